"""What an engine serves, and the one turn in which that changes.

The version, the epoch, the set held as the rollback target, and the labels and salts
of the scheduler change together here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling import kv_connectors
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update.journal import Journal, Recipe, extended
from vllm.inflight.engine.update.ranks import Ranks
from vllm.inflight.errors import VersionConflict
from vllm.inflight.update import Version

START = "start"
"""The lineage of the weights that an engine starts with."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One set of weights, and what is known of it."""

    version: Version = field(default_factory=Version)
    update: Update | None = None
    """The update that it came with; None for the weights of the start."""
    recipe: Recipe | None = ()
    """How it is had again, if files lead to it."""
    lineage: str = START
    """Equal on engines that have come to these weights in the same way: their digest,
    or where that is not known, a hash of what was put on top of what."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """All that changes at a switch, so that it can be taken back as a whole."""

    live: WeightSet = field(default_factory=WeightSet)
    before: WeightSet | None = None
    """What a rollback returns to; None if it is not held."""
    between: dict[str, Any] | None = None
    """The drift between those two, in either direction; None: not known."""
    epoch: int = 0
    """Counts switches and renames; never used twice."""
    changes: int = 0
    """Counts changes of the weights' bytes: what roots are named by."""
    cache_epoch: int = 0
    """The change that began the root of new requests."""
    moved: float = 0.0
    """How far the weights have moved in this cache epoch, at most."""


class LiveVersion:
    """The version served by one engine core, and the one before it."""

    def __init__(self, core: upstream.EngineCore, ranks: Ranks) -> None:
        self._core = core
        self._ranks = ranks
        self.journal = Journal(core.vllm_config)
        self._state = self._before_switch = LiveState()
        """As it is, and as it was before the last switch."""

    @property
    def version(self) -> Version:
        """What is served."""
        return self._state.live.version

    @property
    def update(self) -> Update | None:
        """The update that it came with; None for the weights of the start."""
        return self._state.live.update

    @property
    def changes(self) -> int:
        """How often the weights' bytes have changed."""
        return self._state.changes

    @property
    def lineage(self) -> str:
        """See `WeightSet.lineage`."""
        return self._state.live.lineage

    @property
    def before(self) -> WeightSet | None:
        """What a rollback returns to; None if it is not held."""
        return self._state.before

    @property
    def drift(self) -> float | None:
        """How far what is served is from what was before it; None: not known."""
        between = self._state.between
        return None if between is None else between["overall"]

    def forget_before(self) -> None:
        """The set served before is given up: it is written over, or its memory is."""
        self._change(before=None)

    def expect(self, label: object, field: str) -> None:
        """Raise `VersionConflict` unless `label` is None or what is served."""
        if label is not None and label != self.version.label:
            raise VersionConflict(
                f"{field} is {label!r}, served is {self.version.label!r}"
            )

    def advance(self, label: str | None, update: Update) -> dict[str, Any]:
        """Serve what `update` has staged; returns the facts of the switch."""
        held = self._state.live
        recipe = extended(held.recipe, update, has_drafter=self._ranks.has_drafter)
        lineage = update.digest or _onto(held.lineage, update.sent)

        def take_on() -> None:
            self._age_cache(update.drift)
            self._take_on(label, update.digest, update.step)
            self._change(
                live=WeightSet(self.version, update, recipe, lineage),
                before=held if self._ranks.is_reversible else None,
                between=update.drift,
            )

        return self._flip(take_on)

    def undo(self) -> None:
        """Take back the last switch, which not every engine could make.

        As if it had not been: no step was scheduled since.
        """
        self._ranks.flip()
        self._state = self._before_switch
        self._tell()
        self._note()

    def roll_back(self) -> dict[str, Any]:
        """Serve the version before again; the one left becomes the one before."""
        held, back = self._state.live, self._state.before
        assert back is not None

        def take_on() -> None:
            version = back.version
            self._age_cache(self._state.between)
            self._take_on(version.label, version.digest, version.step)
            live = dataclasses.replace(back, version=self.version)
            self._change(live=live, before=held)

        return self._flip(take_on)

    def lose(self) -> None:
        """The memory of what is served has been given up: nothing has its digest."""
        self._change_version(dataclasses.replace(self.version, digest=None))

    def reset(self) -> None:
        """Other weights have come in the place of those served, past any update."""
        self._age_cache(None)
        self._take_on(None, None, None)
        lineage = _onto(self.lineage, "others")
        self._change(live=WeightSet(self.version, None, None, lineage), between=None)
        self._note()

    def rename(self, label: str) -> None:
        """Call what is served something else: a new version of the same bytes."""
        self._take_on(label, self.version.digest, self.version.step)
        self._note()

    def _flip(self, take_on: Callable[[], None]) -> dict[str, Any]:
        """Flip the ranks and `take_on` what they serve then, or change nothing.

        Returns:
            `gap_ms`, the milliseconds of all of it, and `flip_s`, the seconds that
            the slowest rank took.

        Raises:
            EngineFault: a rank could not flip, and none has.
            SystemExit: the engine cannot tell what its ranks serve.

        """
        started = time.perf_counter()
        in_flight = self._core.batch_queue
        self._ranks.wait_for_steps(in_flight)
        self._before_switch = self._state
        kv_connectors.drop(self._core.scheduler, in_flight)
        flip_s = self._ranks.flip()
        try:
            take_on()
            self._note()
        except BaseException as fault:  # Ctrl-C, too
            self._take_back(fault)
            raise
        switch_ms = (time.perf_counter() - started) * 1e3
        return {"gap_ms": round(switch_ms, 3), "flip_s": round(flip_s, 6)}

    def _take_back(self, fault: BaseException) -> None:
        """What the ranks serve is what is told of it, or the engine ends."""
        try:
            self.undo()
        except BaseException as error:
            raise SystemExit(
                f"vllm-inflight: a switch broke off ({fault}) and could not be taken "
                f"back: {error}"
            ) from error

    def _age_cache(self, drift: dict[str, Any] | None) -> None:
        """Begin a new root, unless the weights have hardly moved since the last one."""
        overall = None if drift is None else drift["overall"]
        moved = self._state.moved + (math.inf if overall is None else overall)
        changes = self._state.changes + 1
        self._change(changes=changes, moved=moved)
        if moved > SchedulerState.of(self._core.scheduler).policy.drift:
            self._change(cache_epoch=changes, moved=0.0)

    def _take_on(self, label: str | None, digest: str | None, step: int | None) -> None:
        """Label and salt from the next step on; nothing ran since the flip."""
        epoch = self._state.epoch + 1
        self._change(epoch=epoch)
        label = label if label is not None else f"update-{epoch}"
        self._change_version(Version(label, epoch, digest, step, time.time()))
        self._tell()

    def _note(self) -> None:
        self.journal.note(self.version, self._state.live.recipe)

    def _tell(self) -> None:
        """Tell the core and the scheduler what is served now."""
        self._core._weight_version = self.version.label
        SchedulerState.of(self._core.scheduler).serve(
            self.version, self._state.cache_epoch, self._state.changes
        )

    def _change(self, **facts: Any) -> None:
        self._state = dataclasses.replace(self._state, **facts)

    def _change_version(self, version: Version) -> None:
        self._change(live=dataclasses.replace(self._state.live, version=version))


def _onto(lineage: str, sent: str | None) -> str:
    """The lineage of what comes of sending `sent` on top of `lineage`."""
    text = f"{lineage}+{sent}".encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()
