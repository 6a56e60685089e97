"""What an engine serves, and the one turn in which that changes.

The version, the epoch, the set held as the way back, and the labels and salts
of the scheduler change together here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from vllm.inflight.commit.transaction import Update
from vllm.inflight.engine import connectors
from vllm.inflight.engine.journal import Journal, Recipe, extended
from vllm.inflight.engine.ranks import Ranks
from vllm.inflight.errors import VersionConflict
from vllm.inflight.update import Version


class Served:
    """The version served by one engine core, and the one before it."""

    def __init__(self, core: Any, ranks: Ranks) -> None:
        self._core = core
        self._ranks = ranks
        self.journal = Journal(core.vllm_config)
        self._epoch = 0
        self._changes = 0
        """Of the weights' bytes, counted: what roots are named by."""
        self._cache_epoch = 0
        """The change that began the root of new requests."""
        self._moved = 0.0
        """How far the weights have moved in this cache epoch, at most."""
        self.version = Version()
        self.update: Update | None = None
        """The update that `version` came with; None for the weights of the start."""
        self._recipe: Recipe | None = ()
        """How it is had again, if files lead to it."""
        self._before: tuple[Version, Update | None, Recipe | None] | None = None
        self._between: dict[str, Any] | None = None
        """How far that is from what is served, in either direction; None: not known."""
        self._left: tuple[Any, ...] = ()
        """All of this as it was before the last switch."""

    @property
    def before(self) -> Version | None:
        """The version that a rollback returns to; None if it is not held."""
        return None if self._before is None else self._before[0]

    @property
    def drift(self) -> float | None:
        """How far what is served is from what was before it; None: not known."""
        return None if self._between is None else self._between["overall"]

    def forget_before(self) -> None:
        """The ranks are about to write over the set served before."""
        self._before = None

    def expect(self, label: Any, field: str) -> None:
        """Raise `VersionConflict` unless `label` is None or what is served."""
        if label is not None and label != self.version.label:
            raise VersionConflict(
                f"{field} is {label!r}, served is {self.version.label!r}"
            )

    def advance(self, label: str | None, update: Update) -> dict[str, Any]:
        """Serve what `update` has staged; returns the facts of the switch."""
        held = (self.version, self.update, self._recipe)
        facts = self._flip(label, update.digest, update.step, update.drift)
        self._before = held if self._ranks.is_reversible else None
        self._between = update.drift
        self.update = update
        self._recipe = extended(
            self._recipe, update, has_drafter=self._ranks.has_drafter
        )
        self._note()
        return facts

    def retreat(self) -> None:
        """Take back the last switch, which not every engine could make.

        As if it had not been: no step was scheduled since.
        """
        self._ranks.flip()
        numbers, version, self.update, self._recipe, way_back = self._left
        self._before, self._between = way_back
        self._epoch, self._changes, self._cache_epoch, self._moved = numbers
        self._serve(version)
        self._note()

    def go_back(self) -> dict[str, Any]:
        """Serve the version before again; the one left becomes the one before."""
        assert self._before is not None
        held = (self.version, self.update, self._recipe)
        version, update, recipe = self._before
        facts = self._flip(version.label, version.digest, version.step, self._between)
        self._before, self.update, self._recipe = held, update, recipe
        self._note()
        return facts

    def lose(self) -> None:
        """The memory of what is served has been given up: nothing has its digest."""
        self.version = dataclasses.replace(self.version, digest=None)

    def replaced(self) -> None:
        """Others weights have come in the place of those served, past any update."""
        self._age_cache(None)
        self._take_on(None, None, None)
        self.update = self._recipe = self._between = None
        self._note()

    def rename(self, label: str) -> None:
        """Call what is served something else: a new version of the same bytes."""
        self._take_on(label, self.version.digest, self.version.step)
        self._note()

    def _flip(
        self,
        label: str | None,
        digest: str | None,
        step: int | None,
        drift: dict[str, Any] | None,
    ) -> dict[str, Any]:
        started = time.perf_counter()
        in_flight = self._core.batch_queue
        self._ranks.wait_for_steps(in_flight)
        numbers = self._epoch, self._changes, self._cache_epoch, self._moved
        way_back = self._before, self._between
        self._left = numbers, self.version, self.update, self._recipe, way_back
        connectors.drop(self._core.scheduler, in_flight)
        flip_s = self._ranks.flip()
        try:
            self._age_cache(drift)
            self._take_on(label, digest, step)
        except Exception as fault:
            self._take_back(fault)
            raise
        switch_ms = (time.perf_counter() - started) * 1e3
        return {"gap_ms": round(switch_ms, 3), "flip_s": round(flip_s, 6)}

    def _take_back(self, fault: Exception) -> None:
        """What the ranks serve is what is told of it, or the engine ends."""
        try:
            self.retreat()
        except Exception as error:
            raise SystemExit(
                f"vllm-inflight: a switch broke off ({fault}) and could not be taken "
                f"back: {error}"
            ) from error

    def _age_cache(self, drift: dict[str, Any] | None) -> None:
        """Begin a new root, unless the weights have hardly moved since the last one."""
        overall = None if drift is None else drift["overall"]
        self._moved += math.inf if overall is None else overall
        self._changes += 1
        if self._moved > self._core.scheduler.inflight_policy.drift:
            self._cache_epoch = self._changes
            self._moved = 0.0

    def _take_on(self, label: str | None, digest: str | None, step: int | None) -> None:
        """Label and salt from the next step on; nothing ran since the flip."""
        self._epoch += 1
        label = label if label is not None else f"update-{self._epoch}"
        self._serve(Version(label, self._epoch, digest, step, time.time()))

    def _note(self) -> None:
        self.journal.note(self.version, self._recipe)

    def _serve(self, version: Version) -> None:
        self.version = version
        self._core._weight_version = version.label
        self._core.scheduler.inflight_serve(version, self._cache_epoch, self._changes)
