"""How often a caller may begin an update: `--inflight-begin-rate`.

A bucket for each caller holds a minute's worth and fills at the rate; a beginning takes
one out. A route may begin an update or go on with one, so it is asked where one begins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from vllm.inflight.errors import TooManyUpdates

MOST_CALLERS = 1024
"""After that, those that have been quiet for a minute are forgotten."""

allowance: ContextVar[Callable[[], None] | None] = ContextVar(
    "inflight_allowance", default=None
)
"""Takes one out for whoever sent the request; None where any number may begin."""


@dataclass(slots=True)
class TokenBucket:
    """What is left to one caller."""

    left: float
    at: float
    """When that was so, on the monotonic clock."""


class RateLimit:
    """The buckets of one server."""

    def __init__(
        self, per_minute: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, per_minute)
        self._clock = clock
        self._buckets: dict[str, TokenBucket] = {}

    @property
    def is_limited(self) -> bool:
        """Whether there is a rate at all."""
        return self._per_second > 0

    def spend(self, caller: str) -> None:
        """Let `caller` begin an update; raises `TooManyUpdates` if it has to wait."""
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
                f"this caller may begin {self._per_second * 60:g} updates a minute; "
                f"the next one in {wait_s} s",
                retry_after_s=wait_s,
            )
        bucket.left -= 1


def is_limited() -> bool:
    """Whether what begins now has to be spent for."""
    return allowance.get() is not None


def spend() -> None:
    """An update begins; raises `TooManyUpdates` if its caller has to wait."""
    if (take := allowance.get()) is not None:
        take()


def spend_once() -> None:
    """The same, for all updates that this call begins from now on."""
    spend()
    allowance.set(None)
