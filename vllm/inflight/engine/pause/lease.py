"""A lease, as on a pause: what it is on ends by itself when nobody renews it.

A controller that dies must not park an engine for ever. So a pause may say for how long
it holds and whose it is; asking again renews it, and when it runs out, the engine goes
on with the weights it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import Malformed, OwnedByAnother

LONGEST_S = 86400
RETRY_S = 1.0

logger = upstream.init_logger(__name__)


class Lease:
    """A lease of one engine core; changed between two steps only.

    Args:
        turn: has a call run between two steps.
        expire: called when it runs out.
        what: it is on, for the log.

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
        """Seconds until it runs out; None if it does not."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def check(self, owner: str | None) -> None:
        """Raise `OwnedByAnother` if the pause is somebody else's.

        Who names no owner is not held up: that is an operator's way in.
        """
        if None not in (owner, self.owner) and owner != self.owner:
            left = self.left_s
            raise OwnedByAnother(
                f"the engine is paused by {self.owner!r}"
                + ("" if left is None else f", for {left:.1f} s unless renewed")
            )

    def take(self, owner: str | None, seconds: float | None) -> None:
        """Begin, or renew; without `seconds` it does not run out."""
        self.drop()
        self.owner = owner
        if seconds is not None:
            self._ends = time.monotonic() + seconds
            timer = threading.Timer(seconds, self._run_out)
            timer.name, timer.daemon = "inflight-lease", True
            self._timer = timer
            timer.start()

    def drop(self) -> None:
        """The pause is over, or has another lease now."""
        if self._timer is not None:
            self._timer.cancel()
        self.owner = self._ends = self._timer = None

    def _run_out(self) -> None:
        timer = threading.current_thread()

        def end() -> None:
            if self._timer is not timer:
                return  # renewed, or over, before this turn came
            logger.warning(
                "the lease of %r on %s has run out: it is over", self.owner, self._what
            )
            try:
                self._expire()
            except Exception:
                logger.exception("it could not go on; once more in %g s", RETRY_S)
                self.take(self.owner, RETRY_S)
                return
            self.num_expired += 1
            self.drop()

        self._turn(end)


def lease_seconds(value: Any, default: float) -> float | None:
    """`lease_s` of a request; 0 is none, and `default` is for one that says nothing."""
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= LONGEST_S:
        raise Malformed(f"lease_s must be seconds from 0 to {LONGEST_S}, got {value!r}")
    return float(value) or None
