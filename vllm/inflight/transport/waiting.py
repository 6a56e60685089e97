"""Wait limits: every wait of the transport ends, with success or with a typed error.

A wait sleeps for at most 2 ms between two checks, so it notices a cancelled update at
once. A call that can only block runs in a thread of its own. If it never returns, that
thread is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vllm.inflight.background import in_background as in_background
from vllm.inflight.errors import Cancelled, TransferFault

FIRST_NAP_S, LONGEST_NAP_S = 5e-5, 2e-3
"""The shortest and longest sleep between two checks. Sleeps grow, because a bucket
takes milliseconds and a stall takes seconds."""

LONGEST_S = 86400.0
"""The longest `timeout_s` that is accepted. A longer one is taken for a mistake."""

T = TypeVar("T")


def never() -> bool:
    """The `cancelled` of a wait that nobody can cancel."""
    return False


def check_timeout(timeout_s: object) -> None:
    """Raise `ValueError` unless `timeout_s` is a number above 0 and below a day."""
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, int | float)
        or not 0 < timeout_s <= LONGEST_S
    ):
        raise ValueError(
            f"timeout_s must be above 0 and at most {LONGEST_S:g}, "
            f"got {timeout_s!r:.80}"
        )


class WaitLimit:
    """The timeout and the cancellation check of one wait.

    Args:
        timeout_s: longest wait, in seconds.
        cancelled: returns True once the wait is not wanted any more.

    """

    def __init__(self, timeout_s: float, cancelled: Callable[[], bool] = never) -> None:
        self.timeout_s = timeout_s
        self._cancelled = cancelled

    def lasting(self, timeout_s: float) -> WaitLimit:
        """A limit with another timeout and the same cancellation check."""
        return WaitLimit(timeout_s, self._cancelled)

    def until(
        self,
        ready: Callable[[], bool],
        waiting_for: str,
        *,
        longest_nap_s: float = LONGEST_NAP_S,
    ) -> float:
        """Wait until `ready()` is true. An error that `ready` raises is passed on.

        Args:
            ready: called between two sleeps.
            waiting_for: names the awaited event in error messages.
            longest_nap_s: longest sleep between two calls of `ready`, in seconds.

        Returns:
            the seconds waited; 0 if `ready()` was true at once.

        Raises:
            Cancelled: the wait was cancelled.
            TransferFault: `timeout_s` is over.

        """
        if ready():
            return 0.0
        began = time.monotonic()
        ends = began + self.timeout_s
        nap = FIRST_NAP_S
        while not ready():
            if self._cancelled():
                raise Cancelled(f"cancelled while waiting for {waiting_for}")
            if time.monotonic() > ends:
                raise TransferFault(
                    f"waited {self.timeout_s:g} s for {waiting_for}; when the peers "
                    "are well, connect again"
                )
            time.sleep(nap)
            nap = min(nap * 2, longest_nap_s)
        return time.monotonic() - began

    def result(self, future: Future[T], waiting_for: str) -> T:
        """The result of `future`; raises as `until` does, or what the future raises."""
        self.until(future.done, waiting_for)
        return future.result()
