"""The gate: where an engine core lets a new version in, between two steps.

It answers the control calls of one engine. Staging runs elsewhere and is only
watched; a commit is one turn of the engine core: every rank flips, the label
and the epoch change, requests are treated as its mode says, and the next step
is scheduled with the new version.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine import counts, doors
from vllm.inflight.engine.lockstep import Lockstep
from vllm.inflight.engine.parent import end_with_parent
from vllm.inflight.engine.pause import Pauses
from vllm.inflight.engine.ranks import Ranks
from vllm.inflight.engine.reply import enveloped
from vllm.inflight.engine.served import Served
from vllm.inflight.engine.sleep import Sleep
from vllm.inflight.engine.turn import Turns
from vllm.inflight.engine.updates import Updates
from vllm.inflight.errors import (
    EngineFault,
    InflightError,
    Malformed,
    NothingToRollBack,
    UpdateBusy,
    VersionConflict,
    WrongPhase,
)
from vllm.inflight.update import PauseMode, Phase, Version, check_label

logger = upstream.init_logger(__name__)


class Gate:
    """Control of one engine core."""

    def __init__(self, core: Any) -> None:
        config = core.vllm_config
        self._core = core
        self._config = InflightConfig.of(config)
        self.num_ranks = config.parallel_config.world_size
        self.ranks = Ranks.of(core)
        self.served = Served(core, self.ranks)
        self.updates = Updates(core, self.ranks, self.served, self._ended)
        self.in_process = not hasattr(core, "input_queue")
        """Whether the engine steps in its caller's process, without a loop."""
        if not self.in_process:
            end_with_parent()
        self.has_actor_group = False
        """Whether PipelineRL's worker calls have joined its trainer's group."""
        self.farewells: list[str] = []
        """Ids of requests aborted in an engine without an output queue."""
        self.leftovers: list[Any] = []
        """Outputs of steps that a pause waited for, in an engine without one."""
        self.counts = counts.Counts()
        self.lockstep = Lockstep(core, lambda: self.ranks.reason is None)
        self.turns = Turns(self.rouse)
        self.sleep = Sleep(core, self)
        self.pauses = Pauses(core, self, lease_s=self._config.pause_lease_s)
        if self.lockstep.is_kept and not self.ranks.is_reversible:
            self.ranks.reason = "engines that step together need a way back"
        if (reason := self.ranks.reason) is not None:
            logger.error(
                "weights of this engine cannot be updated in flight: %s", reason
            )

    # ------------------------------------------------------------ the calls
    def call(self, method: str, body: dict[str, Any]) -> Any:
        """Answer a control call: `{"ok": …}`, `{"error": …}`, or a Future of one.

        Whatever needs weights is refused while they are asleep.
        """

        def answer() -> Any:
            if (handler := _CALLS.get(method)) is None:
                raise Malformed(f"no control call named {method!r}")
            self.sleep.check(method, body)
            return handler(self, body)

        return enveloped(answer)

    def commit(self, body: dict[str, Any]) -> Any:
        """Switch to the staged version; the reply of `/finish_weight_update`."""
        return self._where_all_meet("commit", lambda: self._commit(body))

    def _commit(self, body: dict[str, Any]) -> Any:
        update = self.updates.ledger.require(
            body.get("update_id"), Phase.STAGED, Phase.COMMITTED
        )
        label = check_label(body.get("weight_version"))
        if update.label is not None and label not in (None, update.label):
            raise VersionConflict(
                f"update {update.update_id!r} was begun for version "
                f"{update.label!r}, finished as {label!r}; it stays staged",
                update_id=update.update_id,
            )
        if update.phase is Phase.COMMITTED:
            return update.result
        if update.pending is not None and not update.pending.done():
            return update.pending
        self.served.expect(body.get("expect_version"), "expect_version")
        update.expect(body.get("expect_digest"))
        flush_cache = bool(body.get("flush_cache"))
        # What stays in place keeps its KV, so a flush that names no mode retracts.
        default = "retract" if flush_cache else "in_place"
        mode = PauseMode.parse(body.get("mode") or default)
        self.pauses.check_commit(mode, flush_cache=flush_cache)

        def switch() -> dict[str, Any]:
            # Running requests were waited for: it may have ended meanwhile.
            with self.updates.ledger.held(update):
                facts = self.lockstep.together(
                    lambda: self.served.advance(update.label or label, update),
                    self.served.retreat,
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
            self.sleep.filled()
            logger.info(
                "weights %r (epoch %d) are live: %.3f s after the start of the "
                "update, gap %.2f ms",
                self.version.label,
                self.version.epoch,
                seconds["total"],
                facts["gap_ms"],
            )
            return update.result

        answer = self.pauses.between_requests(mode, switch)
        if isinstance(answer, Future):
            update.pending = answer
        return answer

    def rollback(self, body: dict[str, Any]) -> Any:
        """Serve the version served before again: a commit of the old set."""
        return self._where_all_meet("rollback", lambda: self._rollback(body))

    def _rollback(self, body: dict[str, Any]) -> Any:
        before = self._held()
        if body.get("to_version") not in (None, before.label):
            raise VersionConflict(
                f"held for a rollback is {before.label!r}, not {body['to_version']!r}"
            )
        mode = PauseMode.parse(body.get("mode") or "in_place")
        self.pauses.check_commit(mode)

        def switch() -> dict[str, Any]:
            # Running requests were waited for: others may have come in between.
            if self._held() is not before:
                raise VersionConflict("another version was committed meanwhile")
            left = self.served.update
            facts = self.lockstep.together(self.served.go_back, self.served.retreat)
            if left is not None:
                self.updates.ledger.move(left, Phase.ROLLED_BACK)
            self.counts.switched(facts)
            self.counts.num_rollbacks += 1
            facts |= self.counts.treated(self.pauses.treat(mode))
            logger.info("rolled back to weights %r", self.version.label)
            return self.version.to_dict() | facts

        return self.pauses.between_requests(mode, switch)

    def undo(self, body: dict[str, Any]) -> Any:
        """Take back a commit that other engines could not follow."""
        update = self.updates.ledger.require(body.get("update_id"), Phase.COMMITTED)
        if update is not self.served.update:
            raise WrongPhase(f"update {update.update_id!r} is not what is served")
        return self.rollback({})

    def info(self, body: dict[str, Any]) -> dict[str, Any]:
        """What is served: version, digest, epoch, the version before, and `weights`."""
        del body
        before = self.served.before
        previous = None if before is None else before.to_dict()
        state = {"previous": previous, "weights": self.sleep.weights}
        return self.version.to_dict() | state

    def rename(self, body: dict[str, Any]) -> dict[str, Any]:
        """Call the weights served something else: a version without bytes."""
        label = check_label(body.get("weight_version"))
        if label is None:
            raise Malformed("weight_version is missing")
        self.served.rename(label)
        return self.version.to_dict()

    def pause(self, body: dict[str, Any]) -> Any:
        """Pause in one of the modes of pause.py."""
        return self.pauses.pause(
            PauseMode.parse(body.get("mode") or "abort"),
            flush_cache=bool(body.get("flush_cache")),
            lease_s=body.get("lease_s"),
            owner=body.get("owner"),
        )

    def resume(self, body: dict[str, Any]) -> dict[str, Any]:
        """Go on after a pause; going on twice is going on once."""
        return self.pauses.resume(body.get("owner"))

    def paused(self, body: dict[str, Any]) -> dict[str, Any]:
        """Whether decoding stands still, and in which mode."""
        del body
        return self.pauses.state()

    def close(self) -> None:
        """End the watch and give the board back."""
        self.pauses.close()
        self.lockstep.disarm(EngineFault("the engine has been shut down"))
        self.updates.close()
        self.ranks.close()
        self.served.journal.close()

    @property
    def version(self) -> Version:
        """What is served now."""
        return self.served.version

    # --------------------------------------------------------------- helpers
    def _held(self) -> Version:
        """The version that a rollback returns to; raises if there is none now."""
        if (active := self.updates.ledger.active) is not None:
            raise UpdateBusy(
                f"update {active.update_id!r} is {active.phase.value}; abort it first",
                update_id=active.update_id,
            )
        if (before := self.served.before) is None:
            raise NothingToRollBack("the version served before is not held any more")
        return before

    def _where_all_meet(self, what: str, switch: Callable[[], Any]) -> Any:
        """`switch` now, or where the engines of a lockstep meet."""
        if not self.lockstep.is_kept:
            return switch()
        active = self.updates.ledger.active
        return self.lockstep.arm((what, active and active.digest), switch)

    def _ended(self, error: InflightError) -> None:
        """An update was aborted: nobody needs to wait for its commit any more."""

        def give_up() -> None:
            self.pauses.give_up_commit(error)
            self.lockstep.disarm(error)

        self.turns.submit(give_up)

    def drain(self) -> None:
        """Finish the steps in flight of an engine that steps in its caller's process.

        What comes out of them is kept for whoever asks for output next.
        """
        while self._core.batch_queue:
            outputs, executed = self._core.step_fn()
            self._core.post_step(executed)
            if outputs:
                self.leftovers.append(outputs)

    def rouse(self) -> None:
        """Make the loop of an engine with its own process look for work."""
        if not self.in_process:
            self._core.input_queue.put_nowait(
                (upstream.EngineCoreRequestType.WAKEUP, None)
            )


_CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "begin": lambda gate, body: gate.updates.begin(body),
    "receive": lambda gate, body: gate.updates.receive(body),
    "seal": lambda gate, body: gate.updates.seal(body),
    "commit": Gate.commit,
    "rollback": Gate.rollback,
    "abort": lambda gate, body: gate.updates.abort(body),
    "status": lambda gate, body: gate.updates.status(body),
    "info": Gate.info,
    "rename": Gate.rename,
    "transport": lambda gate, body: gate.updates.transport(body),
    "pause": Gate.pause,
    "resume": Gate.resume,
    "paused": Gate.paused,
    "metrics": counts.told,
    "undo": Gate.undo,
    **doors.CALLS,
}
