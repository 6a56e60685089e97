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
    """A commit or a rollback, as a call that runs between two steps."""

    what: str
    """Its name in messages, for example `the commit of update 'u'`."""
    make: Callable[[], Reply]
    update: Update | None
    """The update that is committed; its end also ends the wait. None for a rollback."""
    to_version: str | None = None
    """For a rollback, the label that it returns to."""
    longest_s: float | None = None
    """The longest wait for requests; None if the deadline of its update counts."""

    @property
    def if_given_up(self) -> str:
        """The end of an error message: what is true if the switch is given up."""
        if self.update is None:
            return "the version served stays"
        return "it is still staged"


@dataclass(frozen=True, slots=True, eq=False)
class WaitingSwitch:
    """A switch that waits for running requests; new requests are queued meanwhile."""

    switch: Switch
    answer: Future[Reply]
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        """Seconds until the switch is given up; None if its update has a deadline."""
        if self.switch.longest_s is None:
            return None
        return max(0.0, self.began + self.switch.longest_s - time.monotonic())
