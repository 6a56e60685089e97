"""What the parts of a controller may use of each other.

`Controller` makes the parts and is an `EngineContext`. Pauses, sleep, rollbacks,
scrubs and the rest are given the context: each names what it needs, and mypy checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.inflight.attached import Attached

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.inflight import upstream
    from vllm.inflight.engine.counters import Counters
    from vllm.inflight.engine.event_log import EventLog
    from vllm.inflight.engine.integrity.outside_writes import OutsideWrites
    from vllm.inflight.engine.integrity.scrubs import Scrubs
    from vllm.inflight.engine.pause.pause import Pauses
    from vllm.inflight.engine.pause.sleep import Sleep
    from vllm.inflight.engine.step_queue import StepQueue
    from vllm.inflight.engine.transaction import Update
    from vllm.inflight.engine.update.dp_commit import DpCommit
    from vllm.inflight.engine.update.live_version import LiveVersion
    from vllm.inflight.engine.update.ranks import Ranks
    from vllm.inflight.engine.update.updates import Updates
    from vllm.inflight.update import Version


class EngineContext(Attached, ABC):
    """One engine core, and the parts of its controller."""

    core: upstream.EngineCore
    in_process: bool
    """Whether the engine steps in its caller's process, without a loop."""
    num_ranks: int
    has_actor_group: bool
    """Whether PipelineRL's worker calls have joined its trainer's group."""
    undelivered_outputs: list[upstream.EngineCoreOutput]
    """Last outputs of requests, in an engine without an output queue."""
    drained_outputs: list[dict[int, upstream.EngineCoreOutputs]]
    """Outputs of steps that a pause waited for, in an engine without one."""
    ranks: Ranks
    live_version: LiveVersion
    updates: Updates
    events: EventLog
    counts: Counters
    dp_commit: DpCommit
    step_queue: StepQueue
    pauses: Pauses
    sleep: Sleep
    scrubs: Scrubs
    outside_writes: OutsideWrites

    @property
    @abstractmethod
    def version(self) -> Version:
        """The live version."""

    @abstractmethod
    def call(self, method: str, body: dict[str, Any]) -> Any:
        """Answer a control call."""

    @abstractmethod
    def may_start(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raise `UpdateBusy` if an update cannot start now."""

    @abstractmethod
    def where_all_meet(
        self, what: tuple[Any, ...], switch: Callable[[], Any], update: Update | None
    ) -> Any:
        """Call `switch` now, or where data-parallel engines commit together."""

    @abstractmethod
    def drain(self) -> None:
        """Finish the steps in flight of an engine in its caller's process."""

    @abstractmethod
    def close(self) -> None:
        """End the threads of the controller."""

    @abstractmethod
    def wake(self) -> None:
        """Make the loop of an engine with its own process look for work."""
