"""The retry budget: the time that one publish may spend on all its calls and retries.

One publish has one budget. Every call, retry and wait of that publish takes its time
from the budget, so together they take no longer than `timeout_s`.
"""

from __future__ import annotations

import threading
import time
import weakref

from vllm.inflight.errors import Cancelled

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 2.0
"""The first and the longest pause between two tries, in seconds. The pause doubles."""

LONGEST_S = 86400.0
"""Longest single wait, in seconds. Sockets and locks have limits, and a budget may be
infinite."""


class RetryBudget:
    """The time that is left for tries, which may be ended or given up early.

    Args:
        timeout_s: the whole time, in seconds, from now on.

    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.waits_for = ""
        """The call that is being retried, in words; empty if there is none."""
        self.given_up: Cancelled | None = None
        """The error with which the budget was given up; None if it was not."""
        self._until = time.monotonic() + timeout_s
        self._over = threading.Event()
        self._parts: weakref.WeakSet[RetryBudget] = weakref.WeakSet()
        self._whole: RetryBudget | None = None

    def begin(self) -> None:
        """Start the whole time again, from now on."""
        self._until = time.monotonic() + self.timeout_s

    def shared(self) -> RetryBudget:
        """A part that runs out with this budget, and can be ended alone."""
        part = RetryBudget(self.timeout_s)
        part._until, part._whole = self._until, self
        self._parts.add(part)
        if (
            self.given_up is not None
        ):  # checked after the part was added, to miss nothing
            part.give_up(self.given_up)
        return part

    def at_most(self, seconds: float) -> RetryBudget:
        """A new budget of at most `seconds`, which does not outlast this one."""
        return RetryBudget(min(seconds, self.left()))

    def overdue_s(self) -> float:
        """Seconds since the time ran out; 0 before that."""
        return max(0.0, time.monotonic() - self._until)

    def left(self) -> float:
        """Seconds that are left, at most `LONGEST_S`; 0 after `end`."""
        left = self._until - time.monotonic()
        return 0.0 if self._over.is_set() else min(LONGEST_S, max(0.0, left))

    def pause(self, seconds: float, waits_for: str = "") -> bool:
        """Wait before another try; False if there is no time for one.

        Args:
            seconds: the length of the pause; shorter if the budget ends before.
            waits_for: the call that is retried, for logs.

        """
        self.note(waits_for)
        self._over.wait(min(seconds, self.left()))
        return self.left() > 0

    def note(self, waits_for: str) -> None:
        """Set `waits_for`, here and in the budget that this is a part of."""
        self.waits_for = waits_for
        if self._whole is not None:
            self._whole.note(waits_for)

    def end(self) -> None:
        """Allow no further tries."""
        self._over.set()

    def give_up(self, error: Cancelled) -> None:
        """End the budget and all its parts; `require` raises `error` from now on."""
        self.given_up = error
        self._over.set()
        for part in list(self._parts):
            part.give_up(error)

    def require(self) -> None:
        """Raise the error with which the budget was given up, if it was."""
        if self.given_up is not None:
            raise self.given_up
