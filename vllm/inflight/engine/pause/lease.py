"""Leases: a pause with a lease ends by itself when its owner does not renew it.

A trainer that dies must not leave an engine paused for ever. So a pause call may name
its owner and the length of its lease. The same call again renews the lease. When the
lease runs out, the engine continues with its live weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import Malformed, OwnedByAnother

LONGEST_S = 86400
RETRY_S = 1.0

logger = upstream.init_logger(__name__)


class Lease:
    """A lease of one engine core. It changes only between two steps.

    Args:
        turn: runs a call between two steps.
        expire: called when the lease runs out. If it returns a Future, the lease ends
            when the Future is done; a renewal before that counts.
        what: the thing that is leased, for the log.

    """

    def __init__(
        self,
        turn: Callable[[Callable[[], Any]], Any],
        expire: Callable[[], Any],
        what: str = "the pause",
    ) -> None:
        self._turn = turn
        self._expire = expire
        self._what = what
        self.owner: str | None = None
        self.num_expired = 0
        self._ends: float | None = None
        self._timer: threading.Timer | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds until the lease runs out; None without an end."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def check(self, owner: str | None) -> None:
        """Raise `OwnedByAnother` if the pause has another owner.

        A call that names no owner is allowed, so that an operator can always act.
        """
        if None not in (owner, self.owner) and owner != self.owner:
            left = self.left_s
            raise OwnedByAnother(
                f"the engine is paused by {self.owner!r}"
                + ("" if left is None else f", for {left:.1f} s unless renewed")
            )

    def take(self, owner: str | None, seconds: float | None) -> None:
        """Begin or renew the lease; without `seconds` it has no end."""
        self.drop()
        self.owner = owner
        if seconds is not None:
            self._ends = time.monotonic() + seconds
            timer = threading.Timer(seconds, self._run_out)
            timer.name, timer.daemon = "inflight-lease", True
            self._timer = timer
            timer.start()

    def drop(self) -> None:
        """End the lease, because the pause is over or another lease replaces it."""
        if self._timer is not None:
            self._timer.cancel()
        self.owner = self._ends = self._timer = None

    def _run_out(self) -> None:
        timer = threading.current_thread()

        def end() -> None:
            if self._timer is not timer:
                return  # renewed or ended before this call ran
            logger.warning(
                "the lease of %r on %s has run out, so %s ends",
                self.owner,
                self._what,
                self._what,
            )
            try:
                answer = self._expire()
            except Exception as error:
                ended(error)
                return
            if isinstance(answer, Future):
                answer.add_done_callback(lambda done: ended(done.exception()))
            else:
                ended(None)

        def ended(error: BaseException | None) -> None:
            if self._timer is not timer:
                return  # renewed or ended while the Future was not done
            if error is None:
                self.num_expired += 1
                self.drop()
                return
            logger.error(
                "%s could not be ended; trying again in %g s",
                self._what,
                RETRY_S,
                exc_info=error,
            )
            self.take(self.owner, RETRY_S)

        self._turn(end)


def lease_seconds(value: Any, default: float) -> float | None:
    """Read `lease_s` of a request: 0 means no lease, and None means `default`."""
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= LONGEST_S:
        raise Malformed(f"lease_s must be seconds from 0 to {LONGEST_S}, got {value!r}")
    return float(value) or None
