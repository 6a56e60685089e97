"""A watch: every wait of the wire ends, by what it waits for or by a typed error.

Nothing here blocks for longer than a nap, so a cancelled update lets go at once. What
can only be called blocking is called in a thread of its own and, at worst, left there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vllm.inflight.background import in_background as in_background
from vllm.inflight.errors import Cancelled, TransferFault

FIRST_NAP_S, LONGEST_NAP_S = 5e-5, 2e-3
"""Naps grow from one to the other: a bucket takes milliseconds, a stall seconds."""

LONGEST_S = 86400.0
"""A wait of more than a day is none that anybody meant."""

T = TypeVar("T")


def never() -> bool:
    """Nobody cancels."""
    return False


def check_timeout(timeout_s: Any) -> None:
    """Raise `ValueError` unless it is a number of seconds that a wait may last."""
    is_number = type(timeout_s) in (int, float)
    if not is_number or not 0 < timeout_s <= LONGEST_S:
        raise ValueError(
            f"timeout_s must be above 0 and at most {LONGEST_S:g}, "
            f"got {timeout_s!r:.80}"
        )


class WaitLimit:
    """How long one wait may last, and who may end it."""

    def __init__(self, timeout_s: float, cancelled: Callable[[], bool] = never) -> None:
        self.timeout_s = timeout_s
        self._cancelled = cancelled

    def lasting(self, timeout_s: float) -> WaitLimit:
        """One that lasts for another time, and that the same may end."""
        return WaitLimit(timeout_s, self._cancelled)

    def until(
        self,
        ready: Callable[[], bool],
        waiting_for: str,
        *,
        longest_nap_s: float = LONGEST_NAP_S,
    ) -> float:
        """Return once `ready()`; its own errors fly.

        Returns the seconds it took; 0 if it was ready.

        Raises:
            Cancelled: nobody wants it any more.
            TransferFault: it has lasted `timeout_s`.

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
        """What `future` comes to; raises as `until` does."""
        self.until(future.done, waiting_for)
        return future.result()
