"""Rollback to the previous version, and undo of a commit that other engines failed.

A rollback is a flip to the rollback target, with the checks of a commit. An undo is not
rejected because of running requests: engines with different versions are worse.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.calls import RollBack, UndoSwitch
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.envelopes import watched
from vllm.inflight.engine.scheduling import kv_connectors
from vllm.inflight.engine.step_queue import whole
from vllm.inflight.engine.switch import Switch
from vllm.inflight.engine.update.live_version import WeightSet
from vllm.inflight.errors import (
    InflightError,
    NothingToRollBack,
    PauseConflict,
    UpdateBusy,
    VersionConflict,
    WrongPhase,
)
from vllm.inflight.update import PauseMode, Phase, Version

Reply = dict[str, Any]


class Rollbacks:
    """The rollbacks of one engine core."""

    def __init__(self, core: upstream.EngineCore, controller: EngineContext) -> None:
        self._core = core
        self._controller = controller
        self._last: tuple[Any, Version] | None = None
        """The id of the last rollback, and the live version after it."""

    def roll_back(self, call: RollBack, *, is_undo: bool = False) -> Any:
        """Flip to the rollback target."""
        self._controller.updates.note_opened()
        before = self._controller.live_version.before
        to = None if before is None else before.lineage
        label = None if before is None else before.version.label

        def log(error: BaseException) -> None:
            if isinstance(error, InflightError) and not is_undo:
                self._controller.events.not_rolled_back(f"rollback to {label!r}", error)

        return watched(
            lambda: self._controller.where_all_meet(
                ("rollback", to), lambda: self._roll_back(call, is_undo), None
            ),
            log,
        )

    def undo(self, call: UndoSwitch) -> Any:
        """Undo a commit or rollback that failed on other engines."""
        if (rollback_id := call.rollback_id) is not None:
            if self._last != (rollback_id, self._controller.version):
                raise WrongPhase("this rollback is not the last switch")
            return self.roll_back(RollBack(), is_undo=True)
        update = self._controller.updates.ledger.require(
            call.update_id, Phase.COMMITTED, Phase.ROLLED_BACK
        )
        if update.phase is Phase.ROLLED_BACK:  # another caller has undone it
            return self._controller.version.to_dict()
        if update is not self._controller.live_version.update:
            raise WrongPhase(f"update {update.update_id!r} is not live")
        return self.roll_back(RollBack(), is_undo=True)

    def held(self) -> Reply:
        """`weight_version` and `lineage` of the rollback target.

        The engines of one front end compare both before any of them rolls back.
        """
        before = self._held()
        return {"weight_version": before.version.label, "lineage": before.lineage}

    def _roll_back(self, call: RollBack, is_undo: bool) -> Any:
        controller, began = self._controller, time.monotonic()
        before = self._held()
        controller.pauses.require_no_rollback()
        label = before.version.label
        if call.to_version not in (None, label):
            raise VersionConflict(
                f"the rollback target is {label!r}, not {call.to_version!r}"
            )
        named = PauseMode.parse(
            call.mode, kv_connectors.default_mode(self._core.scheduler)
        )
        mode = controller.pauses.absorption.at_commit(named)
        try:
            controller.pauses.check_commit(mode, may_keep=mode is not named)
        except PauseConflict:
            if not is_undo:
                raise
            mode = PauseMode.IN_PLACE

        def switch() -> Reply:
            # A commit may have happened while the rollback waited for requests.
            if self._held() is not before:
                raise VersionConflict("another version was committed meanwhile")
            with whole():
                return switch_now()

        def switch_now() -> Reply:
            left, version = controller.live_version.update, controller.version
            facts: Reply = controller.dp_commit.together(
                controller.live_version.roll_back, controller.live_version.undo
            )
            controller.updates.ledger.turn_back(left, controller.live_version.update)
            self._last = call.rollback_id, controller.version
            controller.counts.switched(facts)
            controller.counts.num_rollbacks += 1
            facts |= controller.counts.treated(controller.pauses.treat(mode))
            controller.events.rolled_back(
                version, controller.version, facts["gap_ms"], time.monotonic() - began
            )
            return controller.version.to_dict() | facts

        longest_s = InflightConfig.of(self._core.vllm_config).update_deadline_s
        return controller.pauses.between_requests(
            mode,
            Switch(f"the rollback to {label!r}", switch, None, label, longest_s),
        )

    def _held(self) -> WeightSet:
        """The rollback target; raises if there is none now."""
        if (active := self._controller.updates.ledger.active) is not None:
            raise UpdateBusy(
                f"update {active.update_id!r} is {active.phase.value}; abort it first",
                update_id=active.update_id,
            )
        self._controller.updates.note_opened()
        before: WeightSet | None = self._controller.live_version.before
        if before is None:
            raise NothingToRollBack("the previous version is not kept any more")
        return before
