"""The updates of an engine, from their beginning to the vote.

These calls order the ranks about and return; nothing here waits for a rank, and
nothing here touches what is served.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.inflight.commit.ledger import Ledger
from vllm.inflight.commit.transaction import Update
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine import asked, connectors
from vllm.inflight.engine.lease import check_owner
from vllm.inflight.engine.ranks import Ranks
from vllm.inflight.engine.served import Served
from vllm.inflight.engine.watch import Watch
from vllm.inflight.errors import (
    Conflict,
    EngineFault,
    InflightError,
    Malformed,
    NoTransport,
    UpdateBusy,
    WrongPhase,
)
from vllm.inflight.update import Phase

LONGEST_S = 86400
"""A deadline that never came would keep the second set for good."""

UNDONE_BY = {
    "init": ("shutdown", "POST /shutdown_weight_transfer_engine"),
    "join": ("leave", "POST /destroy_weights_update_group"),
}
"""Orders to a transport that wait for a trainer → order and call that end that."""


@dataclass(frozen=True, slots=True)
class Connecting:
    """An order to a transport, and its answer to come."""

    serial: int
    order: str
    payload: Any
    answer: Future[dict[str, Any]]

    def is_undone_by(self, order: str, payload: Any) -> bool:
        """Whether `order` is the opposite, and of the same group."""
        name = self.payload.get("group_name") if self.order == "join" else payload
        return order == UNDONE_BY.get(self.order, ("",))[0] and payload == name


class Updates:
    """The updates of one engine core."""

    def __init__(
        self,
        core: Any,
        ranks: Ranks,
        served: Served,
        ended: Callable[[InflightError], None],
    ) -> None:
        self._core = core
        self._config = InflightConfig.of(core.vllm_config)
        self._has_transport = core.vllm_config.weight_transfer_config is not None
        self._ranks = ranks
        self._served = served
        self.ledger = Ledger()
        self._ended = ended
        """Called when an update is aborted, on whatever thread that happens."""
        self._watch = Watch(ranks, self.ledger, ended)
        self._connecting: Connecting | None = None
        """What a transport was ordered last."""

    def begin(self, body: dict[str, Any]) -> dict[str, Any]:
        """Open an update; replies `{"update_id", "phase"}`.

        What it expects is asked of a new one: one begun before may have changed that.
        """
        if (known := self.ledger.begun(body)) is not None:
            return {"update_id": known.update_id, "phase": known.phase.value}
        self._ranks.require_staging()
        connectors.check(self._core.scheduler)
        transport = body.get("transport", "configured")
        if transport == "configured":
            self._require_transport()
        manifest = body.get("manifest")
        is_drafters = isinstance(manifest, dict) and manifest.get("draft")
        if self._ranks.has_mtp and (is_drafters or body.get("draft_source")):
            raise Conflict(
                "the drafter is MTP layers of the model, and has no update of its own: "
                "their tensors come with the model's, or as a subset of these, without "
                "draft_path"
            )
        if is_drafters and not self._ranks.has_drafter:
            raise Conflict("no draft model with weights is configured here")
        deadline_s = body.get("deadline_s")
        if deadline_s is None:
            deadline_s = self._config.update_deadline_s
        is_number = type(deadline_s) in (int, float)
        if not is_number or not 0 < deadline_s <= LONGEST_S:
            raise Malformed(
                f"deadline_s must be a number up to {LONGEST_S}, got {deadline_s!r:.80}"
            )
        allow_nonfinite = asked.flag(body, "allow_nonfinite")
        check_owner(body.get("owner"))
        self._served.expect(body.get("base_version"), "base_version")
        self.require_connected()
        update, is_new = self.ledger.begin(body, float(deadline_s))
        if is_new:
            payload = {
                "manifest": manifest,
                "transport": transport,
                "allow_nonfinite": allow_nonfinite,
                "deadline_s": float(deadline_s),
                "sources": {
                    "path": body.get("source"),
                    "draft": body.get("draft_source"),
                },
            }
            self._watch.start(update)
            try:
                self._ranks.order(update.serial, "begin", payload)
            except Exception as error:
                # Who began it has not heard of it, and would not give it up.
                self.end(EngineFault(f"the ranks could not be told: {error}"))
                raise
            self._order_sent(update)
            self.ledger.move(update, Phase.STAGING)
            self._served.forget_before()
        return {"update_id": update.update_id, "phase": update.phase.value}

    def receive(self, body: dict[str, Any]) -> Any:
        """Have a chunk received; the Future is done when every rank has it.

        A chunk with a number is received once, however often it is asked for.
        """
        chunk = body.get("chunk")
        owner = check_owner(body.get("owner"))
        update = self.ledger.find(body.get("update_id"), owner)
        if chunk is not None and chunk != update.num_chunks:
            if type(chunk) is not int or not 0 <= chunk < update.num_chunks:
                raise Malformed(
                    f"chunk must be the next number, {update.num_chunks}, or one "
                    f"sent before, got {chunk!r}"
                )
            if update.phase in (Phase.STAGED, Phase.COMMITTED):
                return self._report(update)
        else:
            self.ledger.require(update.update_id, Phase.STAGING)
            if update.sealed:
                raise WrongPhase(f"update {update.update_id!r} is being finished")
            self._ranks.order(update.serial, "receive", body.get("update_info"))
            update.num_chunks += 1
            self._order_sent(update)
        return self._watch.when_received(update)

    def seal(self, body: dict[str, Any]) -> Any:
        """Close the stream and verify; done when every rank has voted.

        Repeating it for an update that has ended needs its id.
        """
        update_id = body.get("update_id")
        ended = () if update_id is None else (Phase.COMMITTED,)
        phases = (Phase.STAGING, Phase.STAGED, *ended)
        owner = check_owner(body.get("owner"))
        update = self.ledger.require(update_id, *phases, owner=owner)
        if update.phase is not Phase.STAGING:
            return self._report(update)
        if not update.sealed:
            update.sealed = True
            self._ranks.order(update.serial, "seal")
            self._order_sent(update)
        return self._watch.when_staged(update)

    def abort(self, body: dict[str, Any]) -> dict[str, Any]:
        """Give an update up; the weights served are not touched. Idempotent."""
        owner = check_owner(body.get("owner"))
        update = self.ledger.find(body.get("update_id"), owner)
        if update.is_active:
            self.ledger.move(update, Phase.ABORTED)
            self._ranks.cancel(update.serial)
            self._ended(WrongPhase(f"update {update.update_id!r} was aborted"))
        elif update.phase is not Phase.ABORTED:
            raise WrongPhase(
                f"update {update.update_id!r} is {update.phase.value} and cannot be "
                "aborted; POST /rollback_weights returns to the version before",
                phase=update.phase.value,
                update_id=update.update_id,
            )
        return {"update_id": update.update_id, "phase": update.phase.value}

    def end(self, error: InflightError) -> None:
        """Abort the update under way, if there is one, for a reason of the engine's."""
        if (update := self.ledger.active) is not None:
            self._watch.end(update, error)

    def status(self, body: dict[str, Any]) -> dict[str, Any]:
        """Where an update stands; without an id, all that is remembered."""
        if body.get("update_id") is not None:
            return self._report(self.ledger.find(body["update_id"]))
        active = self.ledger.active
        return {
            "active": None if active is None else self._report(active),
            "outcomes": self.ledger.outcomes(),
        }

    def progress(self) -> dict[str, Any]:
        """Of the update under way, in numbers; zeros without one."""
        update, notices = self.ledger.active, []
        if update is not None:
            notices = self._notices_of(update)
        return {
            "updating": update is not None,
            "update_stalled_seconds": 0.0 if update is None else update.stalled_s,
            "update_staged_bytes": sum(n.get("bytes", 0) for n in notices),
            "wire_window_bytes": max(
                (n.get("window_bytes", 0) for n in notices), default=0
            ),
            "wire_bucket_wait_ms": max(
                (n.get("bucket_wait_ms", 0) for n in notices), default=0
            ),
        }

    def transport(self, body: dict[str, Any]) -> Future[dict[str, Any]]:
        """Connect or disconnect a transport, in the staging thread."""
        self._ranks.require_staging()  # else nobody would carry the order out
        if body.get("transport") != "groups":
            self._require_transport()
        if (active := self.ledger.active) is not None:
            raise UpdateBusy(
                f"update {active.update_id!r} is {active.phase.value}",
                update_id=active.update_id,
            )
        order, payload = body["order"], body.get("init_info")
        if order in ("init", "join") and not isinstance(payload, dict):
            raise Malformed("init_info must be an object")
        self.require_connected(order, payload)
        serial = self.ledger.next_serial()
        self._ranks.order(serial, order, payload)
        answer = self._watch.when_carried_out(serial, self._config.update_deadline_s)
        self._connecting = Connecting(serial, order, payload, answer)
        return answer

    def miss(self, body: dict[str, Any]) -> dict[str, Any]:
        """An announcement was refused, and its trainer broadcasts what nobody takes.

        Ranks that have not received it leave the group `group_name`.
        """
        self._ranks.order(0, "miss", body)
        return {}

    def close(self) -> None:
        """End the watch over the ranks."""
        self._watch.close()

    def require_connected(self, order: str = "", payload: Any = None) -> None:
        """Raise `UpdateBusy` while a transport waits for its trainer.

        What comes meanwhile would wait with it, and its outcome would be lost. Only the
        opposite order goes past: it ends the waiting.
        """
        under_way = self._connecting
        if under_way is None or under_way.answer.done():
            return
        if not under_way.is_undone_by(order, payload):
            undoing = UNDONE_BY.get(under_way.order)
            raise UpdateBusy(
                "a transport is being connected or let go; call again after that"
                + (f", or end it with {undoing[1]}" if undoing else "")
            )
        self._ranks.cancel(under_way.serial)

    def _order_sent(self, update: Update) -> None:
        update.num_orders += 1

    def _require_transport(self) -> None:
        if not self._has_transport:
            raise NoTransport("no weight transfer backend is configured")

    def _report(self, update: Update) -> dict[str, Any]:
        report = update.to_dict()
        if update.is_active:
            notices = self._notices_of(update)
            done = [notice.get("orders", 0) for notice in notices]
            is_behind = len(done) < self._ranks.count or min(done) < update.num_orders
            report["waits_for"] = "ranks" if is_behind else "trainer"
            report["ranks"] = [
                {k: v for k, v in notice.items() if k not in ("unfilled", "drift")}
                for notice in notices
            ]
        return report

    def _notices_of(self, update: Update) -> list[dict[str, Any]]:
        return [n for n in self._ranks.notices() if n.get("serial") == update.serial]
