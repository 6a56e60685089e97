"""Patience: how long a trainer goes on trying to reach an engine.

One publish has one patience. Every call, every retry and every wait of that publish
takes its time from it, so that together they take no longer than `timeout_s`.
"""

from __future__ import annotations

import threading
import time
import weakref

from vllm.inflight.errors import Cancelled

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 2.0
"""Between one try and the next; doubled from the first to the last."""

LONGEST_S = 86400.0
"""Of one wait: sockets and locks know no longer ones, and patience may have no end."""


class RetryBudget:
    """How long to go on trying, and whether to."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.waits_for = ""
        """What is tried again at the moment, in words; empty if nothing is."""
        self.given_up: Cancelled | None = None
        """Why nobody wants it any more; None while somebody does."""
        self._until = time.monotonic() + timeout_s
        self._over = threading.Event()
        self._parts: weakref.WeakSet[RetryBudget] = weakref.WeakSet()
        self._whole: RetryBudget | None = None

    def begin(self) -> None:
        """Count its time from now on."""
        self._until = time.monotonic() + self.timeout_s

    def shared(self) -> RetryBudget:
        """One that runs out when this does, and may be ended without it."""
        part = RetryBudget(self.timeout_s)
        part._until, part._whole = self._until, self
        self._parts.add(part)
        if self.given_up is not None:  # after it was added, so that none is missed
            part.give_up(self.given_up)
        return part

    def at_most(self, seconds: float) -> RetryBudget:
        """Another one, which does not last longer than this."""
        return RetryBudget(min(seconds, self.left()))

    def overdue_s(self) -> float:
        """Seconds since its time was over; 0 before that."""
        return max(0.0, time.monotonic() - self._until)

    def left(self) -> float:
        """Seconds that remain, at most `LONGEST_S`; 0 when it has ended."""
        left = self._until - time.monotonic()
        return 0.0 if self._over.is_set() else min(LONGEST_S, max(0.0, left))

    def pause(self, seconds: float, waits_for: str = "") -> bool:
        """Wait before another try; False when there is to be none.

        Args:
            seconds: how long; shorter if the patience ends before.
            waits_for: what is tried again, for whoever asks what takes so long.

        """
        self.note(waits_for)
        self._over.wait(min(seconds, self.left()))
        return self.left() > 0

    def note(self, waits_for: str) -> None:
        """Have `waits_for` told, by this and by the one that it is a part of."""
        self.waits_for = waits_for
        if self._whole is not None:
            self._whole.note(waits_for)

    def end(self) -> None:
        """No further tries, from now on."""
        self._over.set()

    def give_up(self, error: Cancelled) -> None:
        """End it and all of its parts; whoever waits raises `error`."""
        self.given_up = error
        self._over.set()
        for part in list(self._parts):
            part.give_up(error)

    def require(self) -> None:
        """Raise the `Cancelled` that it was given up with, if it was."""
        if self.given_up is not None:
            raise self.given_up
