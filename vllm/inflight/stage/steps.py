"""The steps of one worker: whether it decodes, as its staging thread may ask.

How busy the process is does not tell: the queue that brings a worker its calls spins
for a second after each of them, and an order to stage is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Steps:
    """Counts steps; written by the thread that steps, read by any."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_ended = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is in it is a step, or a part of one."""
        self.num_begun += 1
        try:
            yield
        finally:
            self.num_ended += 1
