"""The steps of one worker: whether it decodes, and on which stream of a GPU.

The second is asked when the weights change. Where an engine is in its caller's process,
another thread may do that, whose current stream is not the one that computes.

How busy the process is does not tell: the queue that brings a worker its calls spins
for a second after each of them, and an order to stage is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Steps:
    """Counts steps; written by the thread that steps, read by any."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
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
            if self._device is not None and self._device.type == "cuda":
                self.stream = torch.cuda.current_stream(self._device)
            self.num_ended += 1
