"""The updates of an engine: start, receive, prepare, abort.

Each call sends commands to the ranks and returns. No call waits for a rank, and no call
touches the live weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.inflight import calls, messages, upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.event_log import EventLog
from vllm.inflight.engine.scheduling import kv_connectors
from vllm.inflight.engine.transaction import Update
from vllm.inflight.engine.update.ledger import Ledger
from vllm.inflight.engine.update.live_version import LiveVersion
from vllm.inflight.engine.update.monitor import UpdateMonitor
from vllm.inflight.engine.update.ranks import Ranks
from vllm.inflight.errors import (
    Conflict,
    EngineFault,
    InflightError,
    Malformed,
    NoTransport,
    UpdateBusy,
    WrongPhase,
)
from vllm.inflight.update import Manifest, Phase, check_flag, check_owner

LONGEST_S = 86400
"""The longest deadline: an endless update would keep the shadow weights for ever."""

ENDED_BY = {
    messages.Init.name: "POST /shutdown_weight_transfer_engine",
    messages.Join.name: "POST /destroy_weights_update_group",
}
"""Transport commands that wait for a trainer, and the call that ends each wait."""


@dataclass(frozen=True, slots=True)
class Connecting:
    """A command to a transport, and the Future of its answer."""

    serial: int
    command: messages.Command
    answer: Future[dict[str, Any]]

    def is_undone_by(self, command: messages.Command | None) -> bool:
        """Whether `command` is the opposite command, for the same group."""
        match self.command, command:
            case messages.Init(), messages.Shutdown():
                return True
            case messages.Join(init_info), messages.Leave(group_name):
                return bool(group_name == init_info.get("group_name"))
        return False


class Updates:
    """The updates of one engine core."""

    def __init__(
        self,
        core: upstream.EngineCore,
        ranks: Ranks,
        live_version: LiveVersion,
        events: EventLog,
        ended: Callable[[Update, InflightError], None],
    ) -> None:
        self._core = core
        self._config = InflightConfig.of(core.vllm_config)
        self._has_transport = core.vllm_config.weight_transfer_config is not None
        self._ranks = ranks
        self._live_version = live_version
        self._events = events
        self.ledger = Ledger(events.moved)
        self._ended = ended
        """Called when an update is aborted, on the thread that aborts it."""
        self._watch = UpdateMonitor(ranks, self.ledger, ended)
        self._connecting: Connecting | None = None
        """The last command to a transport."""
        self._last: Update | None = None
        """The last update, until it is known whether a rank has begun to overwrite the
        rollback target."""

    def start(
        self, call: calls.StartUpdate, *, are_lost: bool = False
    ) -> dict[str, Any]:
        """Open an update; replies `{"update_id", "phase"}`.

        With `are_lost` the live weights are lost, and may be filled in place.
        `base_version` is checked for a new update only, since a repeated call may come
        after the commit. The manifest is packed (`Manifest.packed`).
        """
        if (known := self.ledger.started(call)) is not None:
            return known.state()
        self._ranks.require_staging()
        kv_connectors.check_connectors(self._core.scheduler)
        if call.transport == "configured":
            self._require_transport()
        manifest = call.manifest
        is_drafters = manifest is not None and manifest["draft"]
        if self._ranks.has_mtp and (is_drafters or call.draft_source):
            raise Conflict(
                "the drafter consists of MTP layers of the model and has no update of "
                "its own. Send its tensors with the model's, or as a subset of them, "
                "without draft_path"
            )
        if is_drafters and not self._ranks.has_drafter:
            raise Conflict("no draft model with weights is configured here")
        deadline_s = call.deadline_s
        if deadline_s is None:
            deadline_s = self._config.update_deadline_s
        is_number = type(deadline_s) in (int, float)
        if not is_number or not 0 < deadline_s <= LONGEST_S:
            raise Malformed(
                f"deadline_s must be seconds above 0, up to {LONGEST_S}, got "
                f"{deadline_s!r:.80}"
            )
        allow_nonfinite = check_flag(call.allow_nonfinite, "allow_nonfinite")
        check_owner(call.owner)
        self._live_version.expect(call.base_version, "base_version")
        if manifest is not None:
            self._live_version.expect_base(manifest["base"])
        self.require_connected()
        self.note_opened()
        update, is_new = self.ledger.start(call, float(deadline_s))
        if not is_new:
            return update.state()
        update.base = self._live_version.lineage
        update.is_whole = manifest is None or not Manifest.head(manifest).is_partial
        self._last = update
        command = messages.Start(
            manifest=manifest,
            transport=call.transport,
            allow_nonfinite=allow_nonfinite,
            deadline_s=float(deadline_s),
            are_lost=are_lost,
            path=call.source,
            draft_path=call.draft_source,
        )
        self._watch.start(update)
        try:
            self._ranks.command(update.serial, command)
        except BaseException as error:
            # The caller does not know of the update and would not abort it.
            self.end(EngineFault(f"the command did not reach the ranks: {error!r}"))
            raise
        self._command_sent(update)
        if not self.ledger.move(update, Phase.STAGING):
            assert update.error is not None  # the monitor has ended it meanwhile
            raise update.error
        self._events.began(update, call.transport, time.monotonic() - update.began)
        return update.state()

    def note_opened(self) -> None:
        """Drop the rollback target if a rank has begun to overwrite it.

        A rank posts this before its first write, and never writes for a cancelled
        update (see `StagingThread._open`). So the status is final once the update has
        ended. A later command replaces the statuses, so they are read before it. After
        a commit, the shadow weights hold another version.
        """
        update, is_known = self._last, True
        if update is None:
            return
        if update.is_active or update.phase is Phase.ABORTED:
            has_opened = any(each.opened for each in self._statuses_of(update))
            update.took_target |= self._takes_target(update)
            if has_opened:
                self._live_version.forget_before()
            is_known = has_opened or not update.is_active
        if is_known:
            self._last = None

    def receive(self, call: calls.ReceiveChunk) -> Any:
        """Receive a chunk; the Future is done when every rank has it.

        A numbered chunk is received once, even if the call is repeated.
        """
        chunk = call.chunk
        update = self.ledger.find(call.update_id, check_owner(call.owner))
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
            if update.is_preparing:
                raise WrongPhase(f"update {update.update_id!r} is being finished")
            self._send_chunk(update, messages.Receive(call.update_info))
        return self._watch.when_received(update)

    def call_extension(
        self,
        update: Update,
        method: str | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method of the workers' extension on the shadow weights.

        The Future is done when every rank has called it. Without `method`, it is
        `load_weights` of the model.
        """
        self.ledger.require(update.update_id, Phase.STAGING)
        if update.is_preparing:
            raise WrongPhase(f"update {update.update_id!r} is being finished")
        number = update.num_chunks
        command = messages.CallExtension(number, method, args, kwargs)
        self._send_chunk(update, command)
        return self._watch.when_received(update)

    def _send_chunk(self, update: Update, command: messages.Command) -> None:
        self._ranks.command(update.serial, command)
        update.num_chunks += 1
        self._command_sent(update)

    def prepare(self, call: calls.PrepareUpdate) -> Any:
        """Verify the staged weights; done when every rank has reported.

        Replies with the vote of this engine (see `Update.vote`). A repeated call for an
        update that has ended needs its id.
        """
        update_id = call.update_id
        ended = () if update_id is None else (Phase.COMMITTED,)
        phases = (Phase.STAGING, Phase.STAGED, *ended)
        owner = check_owner(call.owner)
        update = self.ledger.require(update_id, *phases, owner=owner)
        if update.phase is not Phase.STAGING:
            return update.vote()
        if not update.is_preparing:
            update.is_preparing = True
            command = messages.Prepare(update.may_lack, update.may_be_first)
            self._ranks.command(update.serial, command)
            self._command_sent(update)
        return self._watch.when_staged(update)

    def abort(self, call: calls.AbortUpdate) -> dict[str, Any]:
        """Abort an update; the live weights do not change. The call may be repeated.

        With `call.error`, the update ends with that error of another engine.

        Raises:
            Conflict: another body has started the update of this id.

        """
        update = self.ledger.find(call.update_id, check_owner(call.owner))
        if call.fingerprint not in (None, update.fingerprint):
            raise Conflict(
                f"update {update.update_id!r} was started with another body",
                phase=update.phase.value,
                update_id=update.update_id,
            )
        if update.is_active:
            refusal = call.error
            reason = None if refusal is None else InflightError.from_dict(refusal)
            cancel = partial(self._ranks.cancel, update.serial)
            self.ledger.move(update, Phase.ABORTED, reason, cancel)
            aborted = WrongPhase(f"update {update.update_id!r} was aborted")
            self._ended(update, reason or aborted)
        update.is_told = True
        if update.phase is not Phase.ABORTED:
            raise WrongPhase(
                f"update {update.update_id!r} is {update.phase.value} and cannot be "
                "aborted; POST /rollback_weights returns to the previous version",
                phase=update.phase.value,
                update_id=update.update_id,
            )
        # A rank that hears of the abort now may still leave it: see `note_opened`.
        is_lost = update.took_target or self._takes_target(update)
        return update.state() | ({"rollback_target": "lost"} if is_lost else {})

    def _takes_target(self, update: Update) -> bool:
        """Whether there is a rollback target, and a rank begins to overwrite it."""
        has_target = self._live_version.before is not None
        return has_target and any(each.opened for each in self._statuses_of(update))

    def end(self, error: InflightError) -> None:
        """Abort the update under way, if there is one, with `error`."""
        if (update := self.ledger.active) is not None:
            self._watch.end(update, error)

    def status(self, update_id: str | None) -> dict[str, Any]:
        """The report of an update; without an id, of all remembered updates."""
        self.note_opened()
        if update_id is not None:
            return self._report(self.ledger.find(update_id))
        active = self.ledger.active
        return {
            "active": None if active is None else self._report(active),
            "outcomes": self.ledger.outcomes(),
        }

    def progress(self) -> dict[str, Any]:
        """The progress of the update under way, in numbers; zeros without one."""
        update = self.ledger.active
        statuses = [] if update is None else self._statuses_of(update)
        return {
            "updating": update is not None,
            "update_stalled_seconds": 0.0 if update is None else update.stalled_s,
            "update_staged_bytes": sum(each.bytes for each in statuses),
            "wire_window_bytes": max(
                (each.window_bytes or 0 for each in statuses), default=0
            ),
            "wire_bucket_wait_ms": max(
                (each.bucket_wait_ms or 0 for each in statuses), default=0
            ),
        }

    def transport(self, call: calls.TransportCall) -> Future[dict[str, Any]]:
        """Connect or disconnect a transport, in the staging thread."""
        self._ranks.require_staging()  # else no rank would execute the command
        if _is_of_configured(call):
            self._require_transport()
        if (active := self.ledger.active) is not None:
            raise UpdateBusy(
                f"update {active.update_id!r} is {active.phase.value}",
                update_id=active.update_id,
            )
        command = _transport_command(call)
        self.require_connected(command)
        self.note_opened()
        serial = self.ledger.next_serial()
        answer = self._watch.when_carried_out(serial, self._config.update_deadline_s)
        # Set first, so that later calls are rejected and do not wait with this one.
        before = self._connecting
        self._connecting = Connecting(serial, command, answer)
        try:
            self._ranks.command(serial, command)
        except BaseException as error:
            self._ranks.cancel(serial)  # some ranks may have the command
            fault = EngineFault(f"the command did not reach the ranks: {error!r}")
            self._watch.give_up(answer, fault)
            self._connecting = before
            raise
        return answer

    def miss(self, call: calls.MissBroadcast) -> dict[str, Any]:
        """Handle a rejected announcement, whose trainer broadcasts all the same.

        Ranks that have not received the broadcast leave the group `group_name`.
        """
        self._ranks.command(0, messages.Miss(**calls.call_to_dict(call)))
        return {}

    def close(self) -> None:
        """End the update monitor."""
        self._watch.close()

    def require_connected(self, command: messages.Command | None = None) -> None:
        """Raise `UpdateBusy` while a transport waits for its trainer.

        A call meanwhile would wait behind it. Only the opposite command is allowed,
        because it ends the wait.
        """
        under_way = self._connecting
        if under_way is None or under_way.answer.done():
            return
        if not under_way.is_undone_by(command):
            ended_by = ENDED_BY.get(under_way.command.name)
            raise UpdateBusy(
                "a transport is being connected or shut down; call again after that"
                + (f", or end it with {ended_by}" if ended_by else "")
            )
        self._ranks.cancel(under_way.serial)

    def _command_sent(self, update: Update) -> None:
        update.num_commands += 1

    def _require_transport(self) -> None:
        if not self._has_transport:
            raise NoTransport("no weight transfer backend is configured")

    def _report(self, update: Update) -> dict[str, Any]:
        report = update.to_dict()
        if update.is_active:
            statuses = self._statuses_of(update)
            done = [status.orders for status in statuses]
            is_behind = len(done) < self._ranks.count or min(done) < update.num_commands
            report["waits_for"] = "ranks" if is_behind else "trainer"
            report["ranks"] = [status.report() for status in statuses]
        return report

    def _statuses_of(self, update: Update) -> list[messages.Status]:
        return [s for s in self._ranks.statuses() if s.serial == update.serial]


def _is_of_configured(call: calls.TransportCall) -> bool:
    """Whether a call is about the transport that the engine was configured with."""
    match call:
        case calls.InitTransport() | calls.ShutdownTransport():
            return True
        case calls.CompareTensors():
            return call.transport not in messages.TRANSPORTS
    return False


def _transport_command(call: calls.TransportCall) -> messages.Command:
    """The command that a call becomes."""
    match call:
        case calls.InitTransport():
            return messages.Init(_checked(call.init_info))
        case calls.ShutdownTransport():
            return messages.Shutdown()
        case calls.JoinGroup():
            return messages.Join(_checked(call.init_info))
        case calls.LeaveGroup():
            return messages.Leave(call.group_name)
        case calls.CompareTensors():
            return messages.Compare(call.transport, call.update_info)


def _checked(init_info: object) -> dict[str, Any]:
    if not isinstance(init_info, dict):
        raise Malformed("init_info must be an object")
    return init_info
