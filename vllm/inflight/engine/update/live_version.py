"""The live version of an engine, and the flip that changes it.

Only this module changes the version, the epoch, the rollback target, and the
scheduler's labels and cache salts. It changes them together.
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
from vllm.inflight.errors import BaseMismatch, VersionConflict
from vllm.inflight.messages import FlipTo
from vllm.inflight.update import Version

UNTRACKED = "untracked"
"""The beginning of the label of weights that no update has brought."""

START = "start"
"""The lineage of the weights that an engine starts with."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One set of weights: the live weights or the rollback target."""

    version: Version = field(default_factory=Version)
    update: Update | None = None
    """The update that brought these weights; None for the start weights."""
    recipe: Recipe | None = ()
    """How to load these weights from files again; None if files are not enough."""
    lineage: str = START
    """Equal on engines that have reached these weights in the same way. It is their
    digest, or without one a hash of the updates that led to them."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """Everything that a flip changes, so that it can be undone as a whole."""

    live: WeightSet = field(default_factory=WeightSet)
    before: WeightSet | None = None
    """The rollback target; None if it is not kept."""
    between: dict[str, Any] | None = None
    """The drift between these two, in either direction; None if unknown."""
    epoch: int = 0
    """Counts commits, rollbacks, renames and out-of-band writes; never reused."""
    changes: int = 0
    """Counts changes of the weights' bytes. It names prefix-cache namespaces."""
    cache_epoch: int = 0
    """The change that began the prefix-cache namespace of new requests."""
    moved: float = 0.0
    """An upper bound for the drift of the weights in this cache epoch."""


class LiveVersion:
    """The live version of one engine core, and its rollback target."""

    def __init__(self, core: upstream.EngineCore, ranks: Ranks) -> None:
        self._core = core
        self._ranks = ranks
        self.journal = Journal(core.vllm_config)
        self._state = self._before_switch = LiveState()
        """The state now, and the state before the last flip."""

    @property
    def version(self) -> Version:
        """The live version."""
        return self._state.live.version

    @property
    def update(self) -> Update | None:
        """The update that brought the live weights; None for the start weights."""
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
        """The rollback target; None if it is not kept."""
        return self._state.before

    @property
    def drift(self) -> float | None:
        """The drift of the live weights from the version before; None if unknown."""
        between = self._state.between
        return None if between is None else between["overall"]

    def forget_before(self) -> None:
        """Drop the rollback target, because its memory is reused or freed."""
        self._change(before=None)

    def expect(self, label: object, field: str) -> None:
        """Raise `VersionConflict` unless `label` is None or the live label."""
        if label is not None and label != self.version.label:
            raise VersionConflict(
                f"{field} is {label!r}, the live version is {self.version.label!r}"
            )

    def expect_base(self, digest: str | None) -> None:
        """Raise `BaseMismatch` unless `digest` is None or the live version's."""
        if digest is not None and digest != (served := self.version.digest):
            known = "is not known" if served is None else f"is {served}"
            raise BaseMismatch(
                f"the delta starts from the version with digest {digest}, and the "
                f"digest of the live version {known}",
                served=served,
            )

    def advance(self, label: str | None, update: Update) -> dict[str, Any]:
        """Flip to the weights that `update` has staged; returns the flip's times."""
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
        """Undo the last flip, because another engine failed to flip.

        No step was scheduled since, so nothing of the flip remains.
        """
        self._ranks.flip("undo")
        self._state = self._before_switch
        self._tell()
        self._note()

    def roll_back(self) -> dict[str, Any]:
        """Flip to the rollback target; the live version becomes the new target."""
        held, back = self._state.live, self._state.before
        assert back is not None

        def take_on() -> None:
            version = back.version
            self._age_cache(self._state.between)
            self._take_on(version.label, version.digest, version.step)
            live = dataclasses.replace(back, version=self.version)
            self._change(live=live, before=held)

        return self._flip(take_on, "before")

    def lose(self) -> None:
        """Forget the digest, because the live weights are lost."""
        self._change_version(dataclasses.replace(self.version, digest=None))

    def reset(self, label: str | None = None) -> None:
        """Begin a version without a digest, after an out-of-band write.

        Args:
            label: of the version; None: `untracked-<epoch>`.

        """
        self._age_cache(None)
        self._take_on(label or f"{UNTRACKED}-{self._state.epoch + 1}", None, None)
        lineage = _onto(self.lineage, "others")
        self._change(live=WeightSet(self.version, None, None, lineage), between=None)
        self._note()

    def rename(self, label: str) -> None:
        """Give the live weights a new label: a new version of the same bytes."""
        self._take_on(label, self.version.digest, self.version.step)
        self._note()

    def _flip(self, take_on: Callable[[], None], to: FlipTo = "next") -> dict[str, Any]:
        """Flip the ranks and call `take_on`, or change nothing.

        Returns:
            `gap_ms`, the milliseconds of the whole switch, and `flip_s`, the seconds
            that the slowest rank took.

        Raises:
            EngineFault: a rank could not flip, and none has.
            SystemExit: it is unknown which weights are live on the ranks.

        """
        started = time.perf_counter()
        in_flight = self._core.batch_queue
        self._ranks.wait_for_steps(in_flight)
        self._before_switch = self._state
        kv_connectors.drop(self._core.scheduler, in_flight)
        flip_s = self._ranks.flip(to)
        try:
            take_on()
            self._note()
        except BaseException as fault:  # Ctrl-C, too
            self._take_back(fault)
            raise
        switch_ms = (time.perf_counter() - started) * 1e3
        return {"gap_ms": round(switch_ms, 3), "flip_s": round(flip_s, 6)}

    def _take_back(self, fault: BaseException) -> None:
        """Undo a flip after a fault; the engine ends if that fails too."""
        try:
            self.undo()
        except BaseException as error:
            raise SystemExit(
                f"vllm-inflight: a commit or rollback failed ({fault}) and could not "
                f"be undone: {error}"
            ) from error

    def _age_cache(self, drift: dict[str, Any] | None) -> None:
        """Begin a new prefix-cache namespace if the weights have drifted enough."""
        overall = None if drift is None else drift["overall"]
        moved = self._state.moved + (math.inf if overall is None else overall)
        changes = self._state.changes + 1
        self._change(changes=changes, moved=moved)
        if moved > SchedulerState.of(self._core.scheduler).policy.drift:
            self._change(cache_epoch=changes, moved=0.0)

    def _take_on(self, label: str | None, digest: str | None, step: int | None) -> None:
        """Set the version of the next steps; no step ran since the flip."""
        epoch = self._state.epoch + 1
        self._change(epoch=epoch)
        label = label if label is not None else f"update-{epoch}"
        self._change_version(Version(label, epoch, digest, step, time.time()))
        self._tell()

    def _note(self) -> None:
        self.journal.note(self.version, self._state.live.recipe)

    def _tell(self) -> None:
        """Tell the engine core and the scheduler the live version."""
        self._core._weight_version = self.version.label
        SchedulerState.of(self._core.scheduler).serve(
            self.version, self._state.cache_epoch, self._state.changes
        )

    def _change(self, **facts: Any) -> None:
        self._state = dataclasses.replace(self._state, **facts)

    def _change_version(self, version: Version) -> None:
        self._change(live=dataclasses.replace(self._state.live, version=version))


def _onto(lineage: str, sent: str | None) -> str:
    """The lineage of weights that result from sending `sent` on top of `lineage`."""
    text = f"{lineage}+{sent}".encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()
