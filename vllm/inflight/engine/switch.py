"""A switch of the live version: what a commit or a rollback does between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.inflight.engine.transaction import Update

Reply = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Switch:
    """What a commit or a rollback does between two steps, and whose it is."""

    what: str
    """As a message calls it: `the commit of update 'u'`."""
    make: Callable[[], Reply]
    update: Update | None
    """That is committed, and ends it with its own end; None for a rollback."""
    to_version: str | None = None
    """Of a rollback: the label that it returns to."""
    longest_s: float | None = None
    """Most seconds that it waits for requests; None: its update has a deadline."""

    @property
    def if_given_up(self) -> str:
        """What a message says of it when it does not come to be."""
        if self.update is None:
            return "the version served stays"
        return "it is still staged"


@dataclass(frozen=True, slots=True, eq=False)
class WaitingSwitch:
    """A switch that waits for the running requests; new ones wait for it."""

    switch: Switch
    answer: Future[Reply]
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        """Seconds until it is given up; None if its update has the deadline."""
        if self.switch.longest_s is None:
            return None
        return max(0.0, self.began + self.switch.longest_s - time.monotonic())
