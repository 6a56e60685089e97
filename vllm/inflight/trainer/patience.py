"""Patience: how long a trainer goes on trying to reach an engine."""

from __future__ import annotations

import threading
import time

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 2.0
"""Between one try and the next; doubled from the first to the last."""

LONGEST_S = 86400.0
"""Of one wait: sockets and locks know no longer ones, and patience may have no end."""


class Patience:
    """How long to go on trying, and whether to."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._over = threading.Event()

    def shared(self) -> Patience:
        """One that runs out when this does, and may be ended without it."""
        part = Patience(self.timeout_s)
        part._until = self._until
        return part

    def left(self) -> float:
        """Seconds that remain, at most `LONGEST_S`; 0 when it has ended."""
        left = self._until - time.monotonic()
        return 0.0 if self._over.is_set() else min(LONGEST_S, max(0.0, left))

    def pause(self, seconds: float) -> bool:
        """Wait before another try; False when there is to be none."""
        self._over.wait(min(seconds, self.left()))
        return self.left() > 0

    def end(self) -> None:
        """No further tries, from now on."""
        self._over.set()
