"""The interface between the parts of a controller.

`Controller` makes the parts and implements `EngineContext`. Pauses, sleep, rollbacks,
scrubs and the rest are given the context. A part that uses the context is named here
by a protocol of what the others use of it, so that no module imports another in a
circle; mypy checks that each class satisfies its protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from vllm.inflight import upstream
from vllm.inflight.calls import Call
from vllm.inflight.engine.counters import Counters
from vllm.inflight.engine.event_log import EventLog
from vllm.inflight.engine.step_queue import StepQueue
from vllm.inflight.engine.switch import Switch, WaitingSwitch
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update.dp_commit import DpCommit
from vllm.inflight.engine.update.live_version import LiveVersion
from vllm.inflight.engine.update.ranks import Ranks
from vllm.inflight.engine.update.updates import Updates
from vllm.inflight.update import PauseMode, Version


class AbsorbedPause(Protocol):
    """A pause during which decoding goes on, see `pause.absorption.Absorption`."""

    mode: PauseMode | None
    """Its mode; None if no pause is absorbed."""

    @property
    def detail(self) -> str | None:
        """What an operator has to know; None if no pause is absorbed."""

    def enforce(self, need: Any) -> Any:
        """Let it take force; a Future until no step is in flight."""

    def before(self, need: Any, call: Callable[[], Any]) -> Any:
        """Make `call` when no pause is absorbed and no step is in flight."""

    def at_commit(self, mode: PauseMode) -> PauseMode:
        """The mode of a commit that names `mode`."""


class PauseControl(Protocol):
    """The pause of the engine, see `pause.pause.Pauses`."""

    asked: PauseMode | None
    """The mode that a caller of ours asked for; None for a pause of upstream's own."""
    commit: WaitingSwitch | None
    """The commit or rollback that waits for running requests; None without one."""

    @property
    def absorption(self) -> AbsorbedPause:
        """The absorbed pause, if there is one."""

    @property
    def is_paused(self) -> bool:
        """Whether decoding stands still or is about to."""

    @property
    def mode(self) -> PauseMode | None:
        """The mode of the pause in force, whoever began it; None without one."""

    def stop_for_release(
        self, mode: PauseMode, release: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> Any:
        """Stop decoding, treat requests as `mode` says, then call `release`."""

    def note_retracted(self) -> None:
        """Note that requests which a pause held in place have given up their KV."""

    def retract_or_abort(self, why: str) -> None:
        """Retract all requests, and abort those alone that cannot be retracted."""

    def state(self) -> dict[str, Any]:
        """What `GET /is_paused` says."""

    def hold(self) -> bool:
        """Freeze decoding; returns whether it was not paused before."""

    def flush(self) -> dict[str, Any]:
        """Drop every cache."""

    def check_commit(
        self, mode: PauseMode, *, flush_cache: bool = False, may_keep: bool = False
    ) -> None:
        """Raise if a commit cannot treat requests as `mode` says."""

    def between_requests(self, mode: PauseMode, switch: Switch) -> Any:
        """Make `switch` now, or with `wait` once the running requests have ended."""

    def treat(self, mode: PauseMode, *, flush_cache: bool = False) -> dict[str, Any]:
        """Treat running requests as a commit with this mode does."""

    def require_no_rollback(self) -> None:
        """Raise `UpdateBusy` while a rollback waits for running requests."""


class SleepState(Protocol):
    """What memory the engine has given back, see `pause.sleep.Sleep`."""

    is_paused_by_sleep: bool

    @property
    def weights(self) -> str:
        """`live`, `asleep`, `gone` or `loading`."""

    @property
    def detail(self) -> str | None:
        """Why no token is decoded with the weights; None if they are live."""

    @property
    def may_decode(self) -> bool:
        """Whether weights and KV cache are awake, and the weights complete."""

    @property
    def loading(self) -> str | None:
        """Name of the call that has begun a reload and not ended it."""

    @property
    def is_lost(self) -> bool:
        """Whether the contents of the weights are lost."""

    def may_go_on(self, is_asked: bool = False) -> bool:
        """Whether decoding may go on."""

    def release(
        self,
        tags: set[str],
        mode: PauseMode | None,
        *,
        is_trial: bool = False,
        release_id: str | None = None,
    ) -> Any:
        """Release the parts of the memory that `tags` name."""

    def undo_release(self, release_id: str | None) -> None:
        """Wake up the memory of the release with this id."""

    def check_weights(self, *, is_whole: bool) -> None:
        """Raise unless there are weights, or all of them are sent."""

    def lose(self, why: str) -> None:
        """Note that the weights are lost; decoding stops until whole weights come."""

    def follow(
        self, name: str, asleep: set[str], woken: set[str], lost: set[str]
    ) -> None:
        """Record a sleep that a call on the workers has begun or ended by itself."""

    def begin_load(self, name: str) -> None:
        """Note that the call `name` has begun a reload; decoding stops meanwhile."""

    def end_load(self) -> None:
        """Note that the reload has ended."""

    def filled(self) -> None:
        """Note that whole weights have been committed."""


class OutOfBandWrites(Protocol):
    """Writes to live weights past any update, see `integrity.outside_writes`."""

    def abort(self, why: str = ...) -> bool:
        """End a reload under way; returns whether there was one."""

    def acknowledge_sleep(
        self, woken: list[str] | None = None, lost: list[str] | None = None
    ) -> None:
        """Let the ranks forget what the engine core knows of a sleep."""

    def before_call(self, *, is_certain: bool) -> None:
        """Detect writes and sleeps that no worker call has made."""

    def take_back_fill(self) -> None:
        """Mark lost weights again if an update has filled some of them and ended."""

    def make_blank(self, *, keeps_some: bool) -> None:
        """Make lost weights blank, so that writes into them can be told."""

    def progress(self) -> str:
        """How many lost parameters have been written since, for a sentence's end."""


class ScrubResults(Protocol):
    """What scrubbing has found, see `integrity.scrubs.Scrubs`."""

    @property
    def results(self) -> dict[str, int]:
        """Result → number of scrubs."""

    @property
    def differs(self) -> bool:
        """Whether the live weights differ from their digest."""

    def woken(self) -> None:
        """The engine is awake again."""


class EngineContext(Protocol):
    """One engine core, and the parts of its controller."""

    core: upstream.EngineCore
    in_process: bool
    """Whether the engine steps in its caller's process, without a loop."""
    num_ranks: int
    has_actor_group: bool
    """Whether PipelineRL's worker calls have joined its trainer's group."""
    undelivered_outputs: list[upstream.EngineCoreOutput]
    """Last outputs of requests, in an engine without an output queue."""
    ranks: Ranks
    live_version: LiveVersion
    updates: Updates
    events: EventLog
    counts: Counters
    dp_commit: DpCommit
    step_queue: StepQueue

    @property
    def pauses(self) -> PauseControl:
        """The pause."""

    @property
    def sleep(self) -> SleepState:
        """The sleep."""

    @property
    def outside_writes(self) -> OutOfBandWrites:
        """Out-of-band writes."""

    @property
    def scrubs(self) -> ScrubResults:
        """The scrubs."""

    @property
    def version(self) -> Version:
        """The live version."""

    def call(self, call: Call) -> Any:
        """Answer a control call."""

    def may_start(self, update_id: str | None = None) -> dict[str, Any]:
        """Raise `UpdateBusy` if an update cannot start now."""

    def where_all_meet(
        self, what: tuple[Any, ...], switch: Callable[[], Any], update: Update | None
    ) -> Any:
        """Call `switch` now, or where data-parallel engines commit together."""

    def drain(self) -> None:
        """Finish the steps in flight of an engine in its caller's process."""

    def wake(self) -> None:
        """Make the loop of an engine with its own process look for work."""
