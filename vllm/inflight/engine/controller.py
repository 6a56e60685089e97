"""The controller of an engine core: it answers the control calls of one engine.

Each rank's staging thread loads an update, and the controller only watches it. A commit
happens between two steps: every rank flips, the label and the epoch change, and the
mode of the commit says what becomes of running requests. The next step is scheduled
with the new version.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, assert_never

from vllm.inflight import calls, upstream
from vllm.inflight.attached import Attached
from vllm.inflight.calls import Call, call_from_dict
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine import counters
from vllm.inflight.engine.compat import queries
from vllm.inflight.engine.compat.adoption import Adoption
from vllm.inflight.engine.envelopes import enveloped, watched
from vllm.inflight.engine.event_log import EventLog
from vllm.inflight.engine.integrity.outside_writes import OutsideWrites
from vllm.inflight.engine.integrity.scrubs import Scrubs
from vllm.inflight.engine.pause.abort import abort_requests
from vllm.inflight.engine.pause.absorption import Need
from vllm.inflight.engine.pause.pause import Pauses
from vllm.inflight.engine.pause.sleep import Sleep
from vllm.inflight.engine.rollback import Rollbacks
from vllm.inflight.engine.scheduling import kv_connectors
from vllm.inflight.engine.step_queue import StepQueue, whole
from vllm.inflight.engine.switch import Switch
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update.dp_commit import DpCommit
from vllm.inflight.engine.update.live_version import LiveVersion
from vllm.inflight.engine.update.ranks import Ranks
from vllm.inflight.engine.update.updates import Updates
from vllm.inflight.errors import (
    EngineFault,
    InflightError,
    Malformed,
    UpstreamChanged,
    VersionConflict,
    WrongPhase,
)
from vllm.inflight.packed import at_once
from vllm.inflight.update import (
    STAGED_FACTS,
    Manifest,
    PauseMode,
    Phase,
    Version,
    check_flag,
    check_label,
)

logger = upstream.init_logger(__name__)


class Controller(Attached):
    """Control of one engine core."""

    def __init__(self, core: upstream.EngineCore) -> None:
        if not hasattr(core, "scheduler"):
            raise UpstreamChanged(
                "EngineCore calls the step that makes our controller before it has a "
                "scheduler; vllm-inflight cannot start"
            )
        config = core.vllm_config
        self.core = core
        self._config = InflightConfig.of(config)
        self.num_ranks = config.parallel_config.world_size
        self.ranks = Ranks.of(core)
        self.live_version = LiveVersion(core, self.ranks)
        self.events = EventLog(config)
        self.updates = Updates(
            core, self.ranks, self.live_version, self.events, self._ended
        )
        self.in_process = not hasattr(core, "input_queue")
        """Whether the engine steps in its caller's process, without a loop."""
        self.has_actor_group = False
        """Whether PipelineRL's worker calls have joined its trainer's group."""
        self.undelivered_outputs: list[upstream.EngineCoreOutput] = []
        """Last outputs of requests, in an engine without an output queue."""
        self.drained_outputs: list[dict[int, upstream.EngineCoreOutputs]] = []
        """Outputs of steps that a pause waited for, in an engine without one."""
        self.counts = counters.Counters()
        self.dp_commit = DpCommit(core, lambda: self.ranks.reason is None)
        self.step_queue = StepQueue(self.wake)
        self.sleep = Sleep(core, self)
        self.rollbacks = Rollbacks(core, self)
        self.scrubs = Scrubs(core, self)
        self.pauses = Pauses(
            core,
            self,
            lease_s=self._config.pause_lease_s,
            absorbs=self._config.pauses == "absorb",
        )
        self.outside_writes = OutsideWrites(core, self)
        self.adoption = Adoption(core, self)
        if self.dp_commit.is_kept and not self.ranks.is_reversible:
            self.ranks.reason = "engines that step together need a rollback target"
        if (reason := self.ranks.reason) is not None:
            logger.error(
                "weights of this engine cannot be updated in flight: %s", reason
            )

    # ------------------------------------------------------------ the calls
    def call_by_name(self, name: str, fields: dict[str, Any]) -> Any:
        """`call`, of what another process has sent."""
        return enveloped(lambda: self.handle(call_from_dict(name, fields)))

    def call(self, call: Call) -> Any:
        """Answer a control call: `{"ok": …}`, `{"error": …}`, or a Future of one."""
        return enveloped(lambda: self.handle(call))

    def handle(self, call: Call) -> Any:
        """The answer to a control call, or a Future of it.

        A call that needs weights is rejected while the weights are asleep.
        """
        writes = isinstance(call, calls.StartUpdate | calls.RollBack)
        # A swap leaves most of the live weights as they are.
        is_swap = isinstance(call, calls.CommitUpdate)
        writes |= is_swap and self.ranks.has_logs
        self.outside_writes.before_call(is_certain=writes)
        if isinstance(call, calls.StartUpdate):
            self.outside_writes.heal()
        self.sleep.check(call)
        match call:
            case calls.MayStart():
                return self.may_start(call.update_id)
            case calls.WasStarted():
                return {"was_started": self.updates.ledger.was_started(call)}
            case calls.StartUpdate():
                return self.start(call)
            case calls.ReceiveChunk():
                return self.updates.receive(call)
            case calls.PrepareUpdate():
                return self.updates.prepare(call)
            case calls.CommitUpdate():
                return self.commit(call)
            case calls.AdvanceUpdate():
                return self.advance(call)
            case calls.AbortUpdate():
                return self.abort(call)
            case calls.ReadUpdates():
                return self.status(call.update_id)
            case calls.ReadVersion():
                return self.info()
            case calls.RenameVersion():
                return self.rename(call)
            case calls.RollBack():
                return self.rollbacks.roll_back(call)
            case calls.ReadRollbackTarget():
                return self.rollbacks.held()
            case calls.UndoSwitch():
                return self.rollbacks.undo(call)
            case calls.VerifyWeights():
                return self.scrubs.verify()
            case calls.ReadJournal():
                return queries.journal(self, call)
            case (
                calls.InitTransport()
                | calls.ShutdownTransport()
                | calls.JoinGroup()
                | calls.LeaveGroup()
                | calls.CompareTensors()
            ):
                return self.updates.transport(call)
            case calls.MissBroadcast():
                return self.updates.miss(call)
            case calls.PauseDecoding():
                return self.pause(call)
            case calls.ResumeDecoding():
                self.adoption.end_unmarked("resume")
                return self.pauses.resume(call.owner)
            case calls.ReadPause():
                return self.pauses.state() | {"weights_detail": self.sleep.detail}
            case calls.CountRequests():
                return queries.requests(self)
            case calls.AbortRequests():
                return abort_requests(self, call.ids)
            case calls.FlushCaches():
                self.adoption.end_unmarked("a cache reset")
                return self._flush()
            case calls.ReleaseMemory():
                return queries.release(self, call)
            case calls.UndoRelease():
                return queries.undo_release(self, call)
            case calls.ReadChecksums():
                return queries.checksums(self, call)
            case calls.ReadRows():
                return queries.rows(self, call)
            case calls.ReadNames():
                return queries.names(self)
            case calls.FindUnused():
                return queries.unused(self, call)
            case calls.ReadSource():
                return queries.source(self)
            case calls.ReadStaging():
                return self.ranks.staging
            case calls.ReadMetrics():
                return self.metrics()
            case calls.ReadHealth():
                detail = self.sleep.detail or self.scrubs.detail
                absorbed = self.pauses.absorption.detail
                return {"weights_detail": detail, "pause_detail": absorbed}
        assert_never(call)

    def may_start(self, update_id: str | None = None) -> dict[str, Any]:
        """Raise `UpdateBusy` if update `update_id` cannot start now.

        An update writes over the rollback target. A waiting rollback needs it, and so
        does a DP-synchronous commit that may have to be undone.
        """
        self.updates.ledger.require_free(update_id)
        self.pauses.require_no_rollback()
        self.dp_commit.require_unarmed(self.updates.ledger.active)
        return {}

    def start(self, call: calls.StartUpdate) -> dict[str, Any]:
        """Open an update; the reply of `/start_weight_update`."""
        if call.manifest is not None:
            # Control routes have packed the manifest; a call inside the engine has not.
            call = replace(call, manifest=at_once(Manifest.packed(call.manifest)))
        if (known := self.updates.ledger.started(call)) is not None:
            return known.state()
        self.may_start(call.update_id)
        return self.updates.start(call, are_lost=self.sleep.weights == "gone")

    def abort(self, call: calls.AbortUpdate) -> dict[str, Any]:
        """End an update.

        Without an id: the one under way, a rollback that waits, or a reload of
        somebody's own.
        """
        if call.update_id is None and self.outside_writes.abort():
            return {"update_id": None, "phase": Phase.ABORTED.value}
        waits = self.pauses.commit
        is_of_none = call.update_id is None and not self.updates.ledger.active
        if is_of_none and waits is not None and waits.switch.update is None:
            self.pauses.give_up(WrongPhase("it was aborted"))
            return {"update_id": None, "phase": Phase.ABORTED.value}
        if is_of_none and self.dp_commit.is_armed_for(None):
            self.dp_commit.disarm(WrongPhase("the rollback was aborted"))
            return {"update_id": None, "phase": Phase.ABORTED.value}
        return self.updates.abort(call)

    def status(self, update_id: str | None) -> dict[str, Any]:
        """Where an update stands; without an id, all that is known of any."""
        report = self.updates.status(update_id)
        if update_id is not None:
            return report
        waits, rollback = self.pauses.commit, None
        if waits is not None and waits.switch.update is None:
            rollback = {
                "to_version": waits.switch.to_version,
                "deadline_left_s": waits.left_s and round(waits.left_s, 3),
            }
        return report | {
            "rollback": rollback,
            "pause_detail": self.pauses.absorption.detail,
        }

    def advance(self, call: calls.AdvanceUpdate) -> Any:
        """Make several calls of one update; the answer to the last one.

        No call waits for the answer to the one before, because each rank executes its
        commands in order. An update that fails answers every call with its error.
        """
        answer = None
        for name, fields in call.calls:
            answer = self.handle(call_from_dict(name, fields))
        return answer

    def commit(self, call: calls.CommitUpdate) -> Any:
        """Switch to the staged version; the reply of `/finish_weight_update`."""
        active = self.updates.ledger.active
        staged = active and tuple(map(active.vote().get, STAGED_FACTS))

        def told(error: BaseException) -> None:
            if isinstance(error, InflightError) and active and active.is_active:
                self.events.not_committed(active, error)

        return watched(
            lambda: self.where_all_meet(
                ("commit", staged), lambda: self._commit(call), active
            ),
            told,
        )

    def _commit(self, call: calls.CommitUpdate) -> Any:
        update = self.updates.ledger.require(
            call.update_id, Phase.STAGED, Phase.COMMITTED
        )
        label = check_label(call.weight_version)
        if update.label is not None and label not in (None, update.label):
            raise VersionConflict(
                f"update {update.update_id!r} was begun for version "
                f"{update.label!r}, finished as {label!r}; it stays "
                f"{update.phase.value}",
                update_id=update.update_id,
            )
        if update.phase is Phase.COMMITTED:
            return update.result
        if update.pending is not None and not update.pending.done():
            return update.pending
        self.live_version.expect(call.expect_version, "expect_version")
        update.expect(call.expect_digest)
        flush_cache = check_flag(call.flush_cache, "flush_cache")
        # What stays in place keeps its KV, so a flush that names no mode retracts.
        usual = kv_connectors.default_mode(self.core.scheduler)
        named = PauseMode.parse(call.mode, "retract" if flush_cache else usual)
        mode = self.pauses.absorption.at_commit(named)
        self.pauses.check_commit(
            mode, flush_cache=flush_cache, may_keep=mode is not named
        )

        def switch() -> dict[str, Any]:
            # Running requests were waited for: it may have ended meanwhile, and what is
            # served may have another name.
            self.live_version.expect(call.expect_version, "expect_version")
            with whole():
                return switch_now()

        def switch_now() -> dict[str, Any]:
            with self.updates.ledger.held(update):
                facts = self.dp_commit.together(
                    lambda: self.live_version.advance(update.label or label, update),
                    self.live_version.undo,
                )
                self.updates.ledger.move(update, Phase.COMMITTED)
            update.label = self.version.label
            seconds = update.seconds() | {"flip": facts.pop("flip_s")}
            # Before the requests' turn: it is served, whatever becomes of them.
            update.result = (
                self.version.to_dict()
                | facts
                | {"update_id": update.update_id, "seconds": seconds}
                | {"drift": update.drift}
            )
            self.counts.switched(facts)
            self.counts.committed(update)
            treated = self.pauses.treat(mode, flush_cache=flush_cache)
            update.result |= self.counts.treated(treated)
            if update.is_whole:
                self.sleep.filled()
            self.scrubs.committed(update)
            self.events.committed(update, self.version, facts["gap_ms"])
            return update.result

        what = f"the commit of update {update.update_id!r}"
        answer = self.pauses.between_requests(mode, Switch(what, switch, update))
        if isinstance(answer, Future):
            update.pending = answer
        return answer

    def info(self) -> dict[str, Any]:
        """What is served: version, digest, epoch, the version before, and `weights`.

        `weights_detail` says why nothing is decoded with them; None if they live.
        """
        self.updates.note_opened()
        before = self.live_version.before
        previous = None if before is None else before.version.to_dict()
        state = {"previous": previous, "weights": self.sleep.weights}
        state |= {"weights_detail": self.sleep.detail, "scrub": self.scrubs.state()}
        state |= {"worker_extension": self.adoption.state()}
        state |= {"staging": self.ranks.staging}
        return self.version.to_dict() | state

    def rename(self, call: calls.RenameVersion) -> dict[str, Any]:
        """Call the weights served something else: a version without bytes."""
        label = check_label(call.weight_version)
        if label is None:
            raise Malformed("weight_version is missing")
        self.live_version.expect(call.expect_version, "expect_version")
        with whole():
            self.live_version.rename(label)
        return self.version.to_dict()

    def pause(self, call: calls.PauseDecoding) -> Any:
        """Pause in one of the modes of pause.py."""
        return self.pauses.pause(
            PauseMode.parse(call.mode, "abort"),
            flush_cache=check_flag(call.flush_cache, "flush_cache"),
            lease_s=call.lease_s,
            owner=call.owner,
            is_trial=bool(call.is_trial),
        )

    def metrics(self) -> dict[str, Any]:
        """All that `/metrics` says about one engine."""
        pauses = self.pauses.state()
        return self.counts.to_dict() | {
            **self.updates.progress(),
            "epoch": self.version.epoch,
            "weight_version": self.version.label,
            "digest": self.version.digest,
            "drift": self.live_version.drift,
            "outcomes": dict(self.updates.ledger.ended),
            "paused": pauses["is_paused"] and not pauses["absorbed"],
            "pause_absorbed": pauses["absorbed"],
            "leases_expired": pauses["leases_expired"],
            "scrubs": dict(self.scrubs.results),
            "weights_differ": self.scrubs.differs,
        }

    def where_all_meet(
        self, what: tuple[Any, ...], switch: Callable[[], Any], update: Update | None
    ) -> Any:
        """Call `switch` now, or where the engines of a lockstep meet.

        Args:
            what: its name and facts, which have to be equal on all of them.
            switch: that is called.
            update: that it commits, and whose end ends it; None for a rollback.

        """
        if not self.dp_commit.is_kept:
            return switch()
        return self.dp_commit.arm(what, switch, update)

    def close(self) -> None:
        """End the monitor, and release the status board."""
        self.scrubs.close()
        self.pauses.close()
        self.outside_writes.close()
        self.dp_commit.disarm(EngineFault("the engine has been shut down"))
        self.updates.close()
        self.ranks.close()
        self.live_version.journal.close()

    @property
    def version(self) -> Version:
        """What is served now."""
        return self.live_version.version

    # --------------------------------------------------------------- helpers
    def _flush(self) -> Any:
        """Drop the caches; a pause `retract` has to have freed the KV before."""
        absorption = self.pauses.absorption
        if absorption.mode is not PauseMode.RETRACT:
            return queries.flush(self)
        return absorption.before(Need.CACHE_RESET, lambda: queries.flush(self))

    def _ended(self, update: Update, error: InflightError) -> None:
        """Give up the commit of an update that was aborted."""

        def give_up() -> None:
            self.updates.note_opened()
            self.pauses.give_up(error, update)
            if self.dp_commit.is_armed_for(update):
                self.dp_commit.disarm(error)
            self.outside_writes.take_back_fill()

        self.step_queue.submit(give_up)

    def drain(self) -> None:
        """Finish the steps in flight of an engine that steps in its caller's process.

        What comes out of them is kept for whoever asks for output next.
        """
        while self.core.batch_queue:
            outputs, executed = self.core.step_fn()
            self.core.post_step(executed)
            if outputs:
                self.drained_outputs.append(outputs)

    def wake(self) -> None:
        """Make the loop of an engine with its own process look for work."""
        if not self.in_process:
            self.core.input_queue.put_nowait(
                (upstream.EngineCoreRequestType.WAKEUP, None)
            )
