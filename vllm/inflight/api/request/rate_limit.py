"""The rate limit of starts per caller: `--inflight-begin-rate`.

Each caller has a token bucket. It holds the tokens of one minute and fills at the rate.
A start takes one token. Some routes start an update or continue one. So the token is
taken in the code that starts the update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from vllm.inflight.errors import TooManyUpdates

MOST_CALLERS = 1024
"""With more callers, those without a start in the last minute are forgotten."""

allowance: ContextVar[Callable[[], None] | None] = ContextVar(
    "inflight_allowance", default=None
)
"""Takes a token of the caller of this request; None without a rate limit."""


@dataclass(slots=True)
class TokenBucket:
    """The token bucket of one caller."""

    left: float
    at: float
    """The time of the value `left`, on the monotonic clock."""


class RateLimit:
    """The token buckets of one server."""

    def __init__(
        self, per_minute: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, per_minute)
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate limit."""
        return self._per_second > 0

    def spend(self, caller: str) -> None:
        """Take a token of `caller`; raises `TooManyUpdates` if there is none."""
        if not self.is_limited:
            return
        now = self._clock()
        if len(self._buckets) > MOST_CALLERS:
            self._buckets = {k: b for k, b in self._buckets.items() if now - b.at < 60}
        bucket = self._buckets.setdefault(caller, TokenBucket(self._most, now))
        filled = bucket.left + (now - bucket.at) * self._per_second
        bucket.left, bucket.at = min(self._most, filled), now
        if bucket.left < 1:
            wait_s = math.ceil((1 - bucket.left) / self._per_second)
            raise TooManyUpdates(
                f"this caller may start {self._per_second * 60:g} updates a minute; "
                f"start the next one in {wait_s} s",
                retry_after_s=wait_s,
            )
        bucket.left -= 1


def is_limited() -> bool:
    """Whether a start takes a token."""
    return allowance.get() is not None


def spend() -> None:
    """Take a token for a start; raises `TooManyUpdates` if there is none."""
    if (take := allowance.get()) is not None:
        take()


def spend_once() -> None:
    """Take one token for all starts of this call."""
    spend()
    allowance.set(None)
