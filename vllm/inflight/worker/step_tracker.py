"""The steps of one worker: whether it decodes, and on which stream of a GPU.

The stream is needed when the weights change. Where the engine runs in its caller's
process, the thread that changes them may be another one than the thread that steps.

The load of the process does not show whether it decodes. The queue that brings calls to
a worker spins for a second after each call, and a command to stage is a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.worker_state import WorkerState


class StepTracker:
    """Counts steps; one thread writes the counts, and any thread reads them."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self.num_begun = 0
        self.num_ended = 0
        self.stream: torch.cuda.Stream | None = None
        """The stream of the last step, on a GPU."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context: its body is a step, or a part of one."""
        self.num_begun += 1
        try:
            yield
        finally:
            # Set at the end: vLLM may choose a stream in the middle of its first step.
            if self._device is not None:
                self.stream = torch.cuda.current_stream(self._device)
            self.num_ended += 1

    @contextmanager
    def between(self) -> Iterator[None]:
        """Context: its body comes after the last step, and ends before the next."""
        with torch.cuda.stream(self.stream):  # None means the current stream
            try:
                yield
            finally:
                if self._device is not None:
                    torch.cuda.current_stream(self._device).synchronize()


def between_steps(worker: upstream.WorkerBase) -> AbstractContextManager[None]:
    """`StepTracker.between` for a worker; does nothing without a staging worker."""
    stager = WorkerState.of(worker).stager
    return nullcontext() if stager is None else stager.steps.between()
