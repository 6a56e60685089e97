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
from vllm.inflight.engine import asked, connectors, counts, doors
from vllm.inflight.engine.lockstep import Lockstep
from vllm.inflight.engine.overwrite import Overwrites
from vllm.inflight.engine.parent import end_with_parent
from vllm.inflight.engine.pause import Pauses
from vllm.inflight.engine.ranks import Ranks
from vllm.inflight.engine.reply import enveloped
from vllm.inflight.engine.rollback import Rollbacks
from vllm.inflight.engine.scrubs import Scrubs
from vllm.inflight.engine.served import Served
from vllm.inflight.engine.sleep import Sleep
from vllm.inflight.engine.turn import Turns
from vllm.inflight.engine.updates import Updates
from vllm.inflight.errors import (
    EngineFault,
    InflightError,
    Malformed,
    UpdateBusy,
    UpstreamChanged,
    VersionConflict,
)
from vllm.inflight.update import Phase, Version, check_label

logger = upstream.init_logger(__name__)


class Gate:
    """Control of one engine core."""

    def __init__(self, core: Any) -> None:
        if not hasattr(core, "scheduler"):
            raise UpstreamChanged(
                "the constructor of EngineCore calls the step that the gate is hung on "
                "before it has made its scheduler; vllm-inflight cannot start"
            )
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
        self.farewells: list[Any] = []
        """Last outputs of requests, in an engine without an output queue."""
        self.leftovers: list[Any] = []
        """Outputs of steps that a pause waited for, in an engine without one."""
        self.counts = counts.Counts()
        self.lockstep = Lockstep(core, lambda: self.ranks.reason is None)
        self.turns = Turns(self.rouse)
        self.sleep = Sleep(core, self)
        self.rollbacks = Rollbacks(core, self)
        self.scrubs = Scrubs(core, self)
        self.pauses = Pauses(core, self, lease_s=self._config.pause_lease_s)
        self.overwrites = Overwrites(core, self)
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
            self.overwrites.before_call(is_certain=method in ("begin", "rollback"))
            if method == "begin":
                self.overwrites.heal()
            self.sleep.check(method, body)
            return handler(self, body)

        return enveloped(answer)

    def may_begin(self, body: dict[str, Any]) -> dict[str, Any]:
        """Raise `UpdateBusy` if an update that begins would come between others' calls.

        Where it can begin it ends the way back, which a switch of other engines that
        are not done with theirs may need still.
        """
        self.updates.ledger.require_free(body.get("update_id"))
        if self.updates.ledger.active is None and self.pauses.commit is not None:
            raise UpdateBusy("a rollback waits for running requests")
        return {}

    def commit(self, body: dict[str, Any]) -> Any:
        """Switch to the staged version; the reply of `/finish_weight_update`."""
        return self.where_all_meet("commit", lambda: self._commit(body))

    def _commit(self, body: dict[str, Any]) -> Any:
        update = self.updates.ledger.require(
            body.get("update_id"), Phase.STAGED, Phase.COMMITTED
        )
        label = check_label(body.get("weight_version"))
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
        self.served.expect(body.get("expect_version"), "expect_version")
        update.expect(body.get("expect_digest"))
        flush_cache = asked.flag(body, "flush_cache")
        # What stays in place keeps its KV, so a flush that names no mode retracts.
        usual = connectors.default_mode(self._core.scheduler)
        mode = asked.mode(body, "retract" if flush_cache else usual)
        self.pauses.check_commit(mode, flush_cache=flush_cache)

        def switch() -> dict[str, Any]:
            # Running requests were waited for: it may have ended meanwhile, and what is
            # served may have another name.
            self.served.expect(body.get("expect_version"), "expect_version")
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
            self.scrubs.committed(update)
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

    def info(self, body: dict[str, Any]) -> dict[str, Any]:
        """What is served: version, digest, epoch, the version before, and `weights`.

        `weights_detail` says why nothing is decoded with them; None if they live.
        """
        del body
        before = self.served.before
        previous = None if before is None else before.to_dict()
        state = {"previous": previous, "weights": self.sleep.weights}
        state |= {"weights_detail": self.sleep.detail}
        return self.version.to_dict() | state | {"scrub": self.scrubs.state()}

    def abort(self, body: dict[str, Any]) -> dict[str, Any]:
        """Give up the update under way, or a reload of somebody's own."""
        if body.get("update_id") is None and self.overwrites.abort():
            return {"update_id": None, "phase": Phase.ABORTED.value}
        return self.updates.abort(body)

    def rename(self, body: dict[str, Any]) -> dict[str, Any]:
        """Call the weights served something else: a version without bytes."""
        label = check_label(body.get("weight_version"))
        if label is None:
            raise Malformed("weight_version is missing")
        self.served.expect(body.get("expect_version"), "expect_version")
        self.served.rename(label)
        return self.version.to_dict()

    def pause(self, body: dict[str, Any]) -> Any:
        """Pause in one of the modes of pause.py."""
        return self.pauses.pause(
            asked.mode(body, "abort"),
            flush_cache=asked.flag(body, "flush_cache"),
            lease_s=body.get("lease_s"),
            owner=body.get("owner"),
            is_trial=bool(body.get("is_trial")),
        )

    def where_all_meet(self, what: str, switch: Callable[[], Any]) -> Any:
        """Call `switch` now, or where the engines of a lockstep meet."""
        if not self.lockstep.is_kept:
            return switch()
        active = self.updates.ledger.active
        return self.lockstep.arm((what, active and active.digest), switch)

    def close(self) -> None:
        """End the watch and give the board back."""
        self.scrubs.close()
        self.pauses.close()
        self.overwrites.close()
        self.lockstep.disarm(EngineFault("the engine has been shut down"))
        self.updates.close()
        self.ranks.close()
        self.served.journal.close()

    @property
    def version(self) -> Version:
        """What is served now."""
        return self.served.version

    # --------------------------------------------------------------- helpers
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
    "may_begin": Gate.may_begin,
    "was_begun": lambda gate, body: {
        "was_begun": gate.updates.ledger.was_begun(**body)
    },
    "begin": lambda gate, body: gate.updates.begin(body),
    "receive": lambda gate, body: gate.updates.receive(body),
    "seal": lambda gate, body: gate.updates.seal(body),
    "commit": Gate.commit,
    "rollback": lambda gate, body: gate.rollbacks.roll_back(body),
    "abort": Gate.abort,
    "status": lambda gate, body: gate.updates.status(body),
    "info": Gate.info,
    "rename": Gate.rename,
    "transport": lambda gate, body: gate.updates.transport(body),
    "pause": Gate.pause,
    "resume": lambda gate, body: gate.pauses.resume(body.get("owner")),
    "paused": lambda gate, body: (
        gate.pauses.state() | {"weights_detail": gate.sleep.detail}
    ),
    "metrics": counts.told,
    "health": lambda gate, body: {
        "weights_detail": gate.sleep.detail or gate.scrubs.detail
    },
    "verify": lambda gate, body: gate.scrubs.verify(body),
    "undo": lambda gate, body: gate.rollbacks.undo(body),
    **doors.CALLS,
}
