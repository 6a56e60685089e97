"""The steps of one worker: whether it decodes, and on which stream of a GPU.

The second is asked when the weights change. Where an engine is in its caller's process,
another thread may do that, whose current stream is not the one that computes.

How busy the process is does not tell: the queue that brings a worker its calls spins
for a second after each of them, and an order to stage is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class StepTracker:
    """Counts steps; written by the thread that steps, read by any."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self.num_begun = 0
        self.num_ended = 0
        self.stream: torch.cuda.Stream | None = None
        """Of the last step, on a GPU."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is in it is a step, or a part of one."""
        self.num_begun += 1
        try:
            yield
        finally:
            # Not before: vLLM may choose one of its own in the middle of the first.
            if self._device is not None:
                self.stream = torch.cuda.current_stream(self._device)
            self.num_ended += 1

    @contextmanager
    def between(self) -> Iterator[None]:
        """What is in it comes after the last step, and is done before the next one."""
        with torch.cuda.stream(self.stream):  # of None: the current one
            try:
                yield
            finally:
                if self._device is not None:
                    torch.cuda.current_stream(self._device).synchronize()


def between_steps(worker: Any) -> AbstractContextManager[None]:
    """See `StepTracker.between`, of a worker that may have no second set."""
    stager = getattr(worker, "_inflight_stager", None)
    return nullcontext() if stager is None else stager.steps.between()
