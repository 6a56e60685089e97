"""The retry budget: the time that one publish may spend on all its calls and retries.

One publish has one budget. Every call, retry and wait of that publish takes its time
from the budget, so together they take no longer than `timeout_s`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from vllm.inflight.errors import Cancelled

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 2.0
"""The first and the longest pause between two tries, in seconds. The pause doubles."""

LONGEST_S = 86400.0
"""Longest single wait, in seconds. Sockets and locks have limits, and a budget may be
infinite."""

LOOK_S, NOTE_S = 1.0, 30.0
"""How long a wait is not worth a line in the log, and how often that line is repeated,
in seconds."""

logger = logging.getLogger(__name__)


class WaitLog:
    """Logs what a caller waits for, when it changes or every `NOTE_S`."""

    def __init__(self) -> None:
        self._told, self._told_at = "", float("-inf")

    def __call__(self, waits_for: str) -> None:
        now = time.monotonic()
        if waits_for != self._told or now - self._told_at > NOTE_S:
            self._told, self._told_at = waits_for, now
            logger.warning("%s", waits_for)


class RetryBudget:
    """The time that is left for tries, which may be ended or given up early.

    Args:
        timeout_s: the whole time, in seconds, from now on.
        is_logged: whether a line in the log tells what is waited for, if that takes
            more than `LOOK_S`.

    """

    def __init__(self, timeout_s: float, *, is_logged: bool = False) -> None:
        self.timeout_s = timeout_s
        self._log = WaitLog() if is_logged else None
        self._log_from = time.monotonic() + LOOK_S
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
        """Set and log `waits_for`, here and in the budget that this is a part of."""
        self.waits_for = waits_for
        if self._log and waits_for and time.monotonic() >= self._log_from:
            self._log(waits_for)
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
