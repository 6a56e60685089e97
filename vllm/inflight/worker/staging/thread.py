"""The staging thread: it loads one update on one rank while the rank decodes.

The thread lives as long as its update and never touches the live weights. A throttle
leaves decoding its speed. The thread posts its progress on the status board.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from vllm.inflight import messages, upstream
from vllm.inflight.background import Background, where_is
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import (
    BaseMismatch,
    Cancelled,
    DeltaUnsupported,
    EngineFault,
    InflightError,
    Malformed,
    NoTransport,
    TransferFault,
)
from vllm.inflight.messages import Status
from vllm.inflight.packed import is_packed, unpack
from vllm.inflight.releases.fields import UPDATE_INFO, settled
from vllm.inflight.tensor_names import is_torn
from vllm.inflight.transport.base import StagedEngine, unknown_field
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.collective.nccl import still_writes
from vllm.inflight.transport.files.receiver_engine import LocalUpdateInfo
from vllm.inflight.transport.rank_numbers import own_entry, worker_index
from vllm.inflight.update import Manifest
from vllm.inflight.worker.model.kinds.drafter import of_mtp_alone
from vllm.inflight.worker.model.kinds.quantized import require_same_numbers
from vllm.inflight.worker.shadow.carry_over import copy_unsent, layer_siblings, retie
from vllm.inflight.worker.shadow.change_log import Keeping
from vllm.inflight.worker.shadow.parameters import require_in_place
from vllm.inflight.worker.staging.adopted.door import Door, as_it_is
from vllm.inflight.worker.staging.adopted.host_tensors import HostTensors
from vllm.inflight.worker.staging.loader import UpdateLoader
from vllm.inflight.worker.staging.log_filter import (
    STAGING_THREAD,
    silence_expected_warnings,
)
from vllm.inflight.worker.staging.served_comparison import ServedComparison
from vllm.inflight.worker.staging.throttle import pace_of
from vllm.inflight.worker.status_board import StatusBoard
from vllm.inflight.worker.verify.content import Content
from vllm.inflight.worker.verify.model_config import (
    require_same_architecture,
    require_same_config,
)
from vllm.inflight.yielding import beside_decoding, done_with_breaks, resting_by

POLL_S = 0.02
HELD_S = 1.0
"""How often a thread that waits for an earlier one tells where that stands."""
MOST_NAMED = 16
"""Most parameters that a log line names."""

logger = upstream.init_logger(__name__)


def post_failure(
    board: StatusBoard, rank: int, serial: int, error: InflightError
) -> None:
    """Post that update `serial` failed on `rank`, and nothing else of it."""
    status = Status(serial, "failed", error=error.to_dict())
    board.post(rank, status.to_dict())


class StagingThread(Background):
    """The staging of one update on one rank."""

    def __init__(
        self,
        stager: Any,
        board: StatusBoard,
        serial: int,
        *,
        predecessor: StagingThread | None,
    ) -> None:
        super().__init__(name=STAGING_THREAD)
        silence_expected_warnings()
        self.serial = serial
        self._process_ends = False
        self._stager = stager
        self._worker = stager.worker
        self._rank: int = stager.rank
        self._shadow = stager.shadow
        self._config = InflightConfig.of(self._worker.vllm_config)
        self._board = board
        # All of them: the last, given up while it waited itself, may have ended first.
        self._before: list[StagingThread] = predecessor.alive() if predecessor else []
        self._commands: queue.SimpleQueue[messages.Command] = queue.SimpleQueue()
        self._intake: UpdateLoader | None = None
        self._door: Door | None = None
        """What a worker extension loads through; None for another transport."""
        self._sources: dict[str, str | None] = {}
        """The paths that all of it is read from, if it is read from files alone."""
        self._transport: Any = None
        self._is_open = self._transport_open = False
        """Whether an update may have written to the shadow weights; whether a transport
        is loading into them."""
        self._fills = False
        """Whether the live weights are lost, and are filled in place."""
        self._log_number: int | None = None
        """Of the log of delta staging, when it was emptied for this update."""
        self._status = Status(serial, "open")
        self._posted = 0.0
        self._held_told: float | None = None
        """When it was told last what holds this thread; None if nothing does."""
        self._loader: tuple[str, threading.Thread] | None = None
        """A method that has returned, and a thread of it that still loads."""
        self._num_proved = 0
        """Bytes that the proof of the plan has written; see `Shadow.prove`."""
        self._num_moved = 0
        """Bytes of the way back that were moved into host memory."""
        self._pace = pace_of(
            self._config,
            self._worker.device,
            stager.steps,
            stager.shadow.num_threads,
        )

    def put(self, command: messages.Command) -> None:
        """Have a command carried out, after those before it."""
        self._commands.put(command)

    def end(self) -> None:
        """Give the update up, because the process ends."""
        self._process_ends = True

    def ends_by(self, deadline: float) -> bool:
        """Wait for this job and those before it; whether they end by `deadline`."""
        for job in self.alive():
            job.join(max(0.0, deadline - time.monotonic()))
        return not self.alive()

    @property
    def is_ending(self) -> bool:
        """Whether this job carries no more commands out; it may be at its last one."""
        return self._is_cancelled() or self._status.state in ("failed", "staged")

    def alive(self) -> list[StagingThread]:
        """This job and those before it, without those that have ended."""
        return [job for job in (*self._before, self) if job.is_alive()]

    def run(self) -> None:
        """Carry commands out until the last one, an error or a cancellation."""
        try:
            self._wait_for_others()
            self._post()
            with (
                torch.no_grad(),
                self._stager.staging_stream(),
                self._pace.settled(),
            ):
                is_near = True
                while not self._is_cancelled():
                    command = self._next(is_near=is_near)
                    is_near = command is not None
                    if command is None:
                        continue
                    with beside_decoding(), resting_by(self._take_break):
                        self._carry_out(command)
                    self._post(orders=self._status.orders + 1)
                    if command.is_last:
                        return
            raise Cancelled("the update was aborted")
        except InflightError as error:
            self._leave(error)
        except BaseException as error:
            # A transport that calls sys.exit() ends this thread, and nothing else.
            # Whoever waits for this rank has to hear of it all the same.
            logger.exception("update %d failed on rank %d", self.serial, self._rank)
            self._leave(EngineFault(f"{type(error).__name__}: {error}"))
        finally:
            self._intake = None  # the two hold each other, and what came
            self._shadow.take_processed = None

    def _next(self, *, is_near: bool) -> messages.Command | None:
        """The next command; None if none comes within `POLL_S`.

        Args:
            is_near: whether it may come at once, as after the start and after another
                one. Then a thread that decodes hands the interpreter over as soon as
                during a command; else the command begins milliseconds later.

        """
        with beside_decoding() if is_near else nullcontext():
            try:
                return self._commands.get(timeout=POLL_S)
            except queue.Empty:
                return None

    # ----------------------------------------------------------------- commands
    def _carry_out(self, command: messages.Command) -> None:
        match command:
            case messages.Start():
                self._start(command)
            case messages.Receive(update_info):
                self._receive(update_info)
            case messages.CallExtension():
                self._call_extension(command)
            case messages.Prepare():
                self._prepare(command)
            case messages.Init(init_info):
                self._init_transport(self._choose("configured"), init_info)
            case messages.Join(init_info):
                self._init_transport(self._choose("groups"), init_info)
            case messages.Shutdown():
                self._choose("configured").shutdown()
            case messages.Leave(group_name):
                self._stager.groups.leave(group_name)
            case messages.Compare():
                self._compare(command)

    def _start(self, command: messages.Start) -> None:
        # Half of the time for staging at leisure, half for what is then left.
        self._pace.hurry_after(command.deadline_s / 2)
        manifest = Manifest()
        if command.manifest is not None:
            manifest = done_with_breaks(Manifest.unpacked(command.manifest))
        if manifest.config:
            require_same_architecture(
                manifest.config, self._worker.vllm_config.model_config
            )
        self._transport = self._choose(command.transport)
        if still_writes():
            raise EngineFault(
                "a broadcast of an aborted update has not ended on the GPU and may "
                "still write; if this stays so, restart the engine"
            )
        if manifest.base is not None:
            self._require_base(manifest.base)
        self._sources = {"path": command.path, "draft": command.draft_path}
        self._post(state="staging")
        # Of a set that a rollback can return to, this changes no byte.
        self._shadow.prepare()
        self._fills = command.are_lost and self._shadow.log is not None
        self._intake = UpdateLoader(
            self._shadow,
            manifest,
            verify=self._config.verify != "off",
            allow_nonfinite=command.allow_nonfinite,
            cancelled=self._is_cancelled,
            progress=self._progress,
            first_write=self._open,
            between_flips=lambda: self._stager.between_flips(self._is_cancelled),
            served=self._stager.served,
            between=self._rest,
            fills=self._fills,
        )
        if command.transport == "extension":
            assert self._shadow.module is not None
            device = torch.device(self._worker.device)
            has_both = self._shadow.arenas and self._shadow.log is None
            self._door = Door(
                self._intake.load_weights,
                self._shadow.module,
                self._shadow.live,
                clones=self._shadow.is_remade,
                device=device,
                writes=self._intake.writes,
                before_write=self._before_write,
                to_device=HostTensors(device).to_device if has_both else as_it_is,
            )
            self._intake.coverage.lets_write = self._shadow.log is None
            self._stager.extension.note_source()
        self._intake.coverage.stand_before(self._door or self._intake.load_weights)
        if manifest.tensors:
            self._intake.foresee(manifest.tensors, are_all=manifest.base is None)

    def _require_base(self, base: str) -> None:
        """Raise `BaseMismatch` unless this rank serves that version."""
        served = self._stager.served
        digest = None if served is None else served.digest()
        if digest != base:
            raise BaseMismatch(
                f"the delta starts from the version with digest {base}, and this rank "
                f"serves {digest or 'weights of unknown digest'}",
                served=digest,
            )

    def _give_up_way_back(self) -> None:
        """From here on nothing can be rolled back to.

        All that can be looked at without a write has been by now: the manifest, the
        path and what its files say of themselves. A transport of somebody else may
        write whenever it receives; ours write what the intake has drawn from them.

        The engine core forgets the set served before when it reads `opened`. It writes
        a cancellation first and reads second; here it is posted first, and whether the
        update was cancelled is asked second. So what is opened is known there whenever
        no update is under way, and a rollback never meets a set that is written to.
        """
        if self._status.opened:
            return
        self._post(opened=True)
        try:
            self._stager.open(self._is_cancelled)
        except Cancelled:
            self._status = replace(self._status, opened=False)
            raise

    def _open(self) -> None:
        """Before the first write: it is into the set that a rollback returns to.

        With delta staging it is beside the way back, as long as both have room. See
        `Keeping`.
        """
        if self._is_open:
            return
        assert self._intake is not None
        move = functools.partial(self._stager.move_way_back, self._is_cancelled)
        keeping = Keeping(self._give_up_way_back, self._between_moves, move)
        keeps = not self._fills and self._stager.begin_log(self._is_cancelled, keeping)
        if not keeps:
            self._give_up_way_back()
        self._is_open = True
        if self._shadow.log is not None:
            self._log_number = self._shadow.log.number
        if self._fills:
            self._stager.begin_fill()
        if not self._intake.is_delta:
            self._shadow.forget_changed()
        if self._door is not None and self._shadow.log is None:
            # The method may write past the door, where nobody watches.
            self._shadow.stale.update(self._shadow.required)
        self._shadow.prove(self._between_proofs)  # it writes, so it comes no sooner
        self._transport_open = True
        self._transport.start_weight_update()
        if not isinstance(self._transport, StagedEngine):
            require_in_place(self._shadow.module)
        if self._intake.writes_elements:
            self._shadow.reset()  # no layer is loaded, and none is processed
        # A method of an extension may call a parameter's loader. Where layers have no
        # memory, upstream's would keep the tensor, so ours has to be there before.
        is_ours = isinstance(self._transport, StagedEngine)
        is_called = self._intake.coverage.lets_write and self._shadow.is_remade
        load = self._door or self._intake.load_weights
        self._intake.coverage.watch(load, at_once=not is_ours or is_called)

    def _before_write(self) -> None:
        """Before a method of an extension writes a parameter itself."""
        if self._is_cancelled():
            raise Cancelled("the update was aborted")
        self._open()

    def _receive(self, payload: Any) -> None:
        info = self._read(payload)
        assert self._intake is not None
        if isinstance(self._transport, StagedEngine):
            folder = self._transport.folder_of(info)
            if folder is not None and not self._intake.is_drafters:
                require_same_config(folder, self._worker.vllm_config.model_config)
            preview = self._transport.preview(info)
        else:
            preview = nullcontext()
            self._open()
        with preview as announced:
            if announced is not None and not self._intake.is_delta:
                self._foresee(info, announced)
            # Not update_weights(): that ends in a device-wide wait.
            self._transport.receive_weights(info)
        # Told that we have it, a trainer may write over memory that we share with it.
        self._stager.drain()
        self._intake.require_taken()
        parameters = self._intake.coverage.tally()
        self._status = replace(self._status, parameters=parameters)

    def _call_extension(self, command: messages.CallExtension) -> None:
        intake, door = self._intake, self._door
        assert intake is not None and door is not None
        extension = self._stager.extension
        try:
            result = extension.call(command, door, self._waits_for)
        except InflightError as error:
            self._give_up_unseen()
            if not isinstance(error, EngineFault):
                raise
            if door.failure is not None:
                raise door.failure from None
            intake.require_accepted()  # it names the tensors, and the method does not
            raise
        finally:
            self._tell_free()
        if self._is_cancelled():  # a thread of the method may have been left
            raise Cancelled("the update was aborted")
        # Kept before anything below fails: the caller gets it as it is.
        extension.keep(self.serial, command.number, result, door.first)
        self._stager.drain()
        if door.failure is not None:
            raise door.failure
        intake.require_accepted()
        if not self._is_open:
            door.require_all_through(intake.coverage.begun)
            # No tensor came. Writes to `param.data` are not seen, so nothing can be
            # rolled back to from here on.
            self._open()
            door.note_homes()
        self._status = replace(self._status, parameters=intake.tally())

    def _give_up_unseen(self) -> None:
        """A method has failed before the door saw a write of it.

        It may have written past the door, as a thread of it does: into the set that a
        rollback returns to.
        """
        if self._is_open or self._shadow.log is not None:
            return
        self._shadow.stale.update(self._shadow.required)
        self._give_up_way_back()

    def _allow_lack(self, framework: str, may_be_first: bool) -> None:
        """Let parameters keep their live values if the framework never sends them."""
        assert self._intake is not None
        if self._fills:
            return  # there is no live value
        begun = frozenset(self._intake.coverage.begun)
        usual = self._stager.sent_by.get(framework, begun if may_be_first else None)
        if not begun or begun != usual:
            return
        is_first = framework not in self._stager.sent_by
        doubted = self._stager.doubted.pop(framework, None)
        unsent = set(self._intake.due() - begun)
        if is_first and begun != doubted and is_torn(begun, unsent):
            # A trainer may have begun before this engine did.
            self._stager.doubted[framework] = begun
            logger.error(
                "the first version of %s lacks tensors of a part of the model whose "
                "others it has, as one does whose beginning an engine has missed; it "
                "is rejected. If they are left out on purpose, send the same again",
                framework,
            )
            return
        kept = self._intake.leave_unsent()
        if not kept:
            return
        logger.log(
            logging.WARNING if is_first else logging.INFO,
            "%s has written %d parameters and marked the end of its version; %d others "
            "keep their live values: %s%s",
            framework,
            len(begun),
            len(kept),
            ", ".join(kept[:MOST_NAMED]) + (", …" if len(kept) > MOST_NAMED else ""),
            ". It is the first version of this engine, so nothing tells whether they "
            "were left out on purpose; later versions have to leave out the same"
            if is_first
            else "",
        )

    def _allow_lack_of_mtp(self) -> None:
        """Let MTP layers keep their live values if a framework has sent none of them.

        Its trainer may have no such layers. The model checks every token that they
        draft.
        """
        assert self._intake is not None and self._shadow.module is not None
        if self._fills:
            return  # there is no live value
        begun, due = self._intake.coverage.begun, self._intake.due()
        of_mtp = of_mtp_alone(self._shadow.module, due)
        if begun and of_mtp and due - begun <= of_mtp and of_mtp.isdisjoint(begun):
            self._intake.leave_unsent()
            logger.info("no tensor of MTP layers has come; they keep their live values")

    def _read(self, payload: object) -> Any:
        """What `update_info` says to the transport; raises `Malformed`."""
        transport = self._transport
        if is_packed(payload):
            payload = done_with_breaks(unpack(payload))
        if isinstance(payload, list):
            parallel = self._worker.vllm_config.parallel_config
            if (index := own_entry(payload, parallel)) is None:
                raise Malformed(
                    f"update_info is a list of {len(payload)} entries, and has none "
                    f"for the worker of index {worker_index(parallel)}: give one entry "
                    "for each worker, or one object for all"
                )
            payload = payload[index]
        payload = done_with_breaks(unpack(payload))
        info_cls = transport.update_info_cls
        known = frozenset(getattr(info_cls, "__dataclass_fields__", ()))
        if isinstance(payload, dict):
            payload = settled(payload, UPDATE_INFO, known=known, opened_with=transport)
        try:
            return transport.parse_update_info(payload)
        except ValueError as error:
            # Without fields it is a worker extension, which says itself what is wrong.
            why = unknown_field(info_cls, "update_info", payload) if known else None
            told = f"{why or error}{self._of_local(payload)}"
            raise Malformed(told) from error

    def _of_local(self, payload: object) -> str:
        """What to do with files that were sent to an engine of another backend."""
        configured = self._worker.vllm_config.weight_transfer_config
        fields = LocalUpdateInfo.__dataclass_fields__.keys()
        if (
            configured is None
            or issubclass(self._transport.update_info_cls, LocalUpdateInfo)
            or not (isinstance(payload, dict) and payload and payload.keys() <= fields)
        ):
            return ""
        return (
            f"; this update_info is of backend 'local', as a Publisher sends it, and "
            f"the engine has backend {configured.backend!r}: start the engine with "
            """--weight-transfer-config '{"backend": "local"}', or send as its """
            "backend does"
        )

    def _compare(self, command: messages.Compare) -> None:
        """Receive what fills no parameter; the shadow weights are not written."""
        self._transport = self._choose(command.transport)
        info = self._read(command.update_info)
        verify = self._config.verify != "off"
        comparison = ServedComparison(self._shadow, self._stager.served, verify=verify)
        with comparison.standing_in():
            self._transport.receive_weights(info)
        comparison.judge()

    def _prepare(self, command: messages.Prepare) -> None:
        assert self._intake is not None
        intake, shadow = self._intake, self._shadow
        if self._door is not None:
            self._door.require_all_through(intake.coverage.begun)
        if command.may_lack is not None:
            self._allow_lack(command.may_lack, command.may_be_first)
        elif self._door is not None:
            self._allow_lack_of_mtp()
        if self._is_open and self._transport.defers_processing:
            self._transport.drain_pending()
        intake.complete()
        sent, begun = intake.verdict(), intake.coverage.begun
        if not intake.coverage.is_whole:
            shadow.release_idle()
            shadow.stale.update(layer_siblings(shadow, begun))
        self._transport.finish_weight_update()
        self._transport_open = False
        if shadow.log is not None:
            shadow.log.require_room()
        intake.require_finite()
        require_same_numbers(shadow.live, shadow.module, begun & shadow.quantised)
        retie(shadow, begun)
        carried = 0
        try:
            if shadow.log is None:  # else the parameters that were not sent just stay
                carried = copy_unsent(shadow, begun | intake.written, self._between)
            shadow.derive()
        finally:
            # The next update may write to the same places from another stream.
            self._stager.drain()
        intake.coverage.unwatch()
        base = sent.of_target()
        whole: Content | None = base
        if intake.is_partial:
            whole = base.over(self._stager.served, intake.is_spare)
        if command.may_lack is not None:
            self._stager.note_sent(command.may_lack, begun)
        digest = sent.digest()
        whole_digest: str | None = digest
        if intake.written_digest is not None:
            # A method has written parameters itself, so not every tensor is known. The
            # digest is told only if nothing was carried over.
            whole, whole_digest = None, None if intake.is_partial else digest
        elif whole is not sent:
            whole_digest = None if whole is None else whole.digest()
        self._status = replace(
            self._status,
            carried=carried,
            drift=self._stager.staged(
                whole, self._log_number, marks=intake.marks, fills=self._fills
            ),
            sent=digest,
            shares=intake.shares,
            digest=whole_digest,
            written=intake.written_digest,
            unfilled=intake.unfilled,
            bytes=intake.num_bytes,
            replayed=shadow.plan.num_proved,
            unproved=shadow.num_unproved,
            in_place=intake.num_in_place,
            state="staged",
        )

    def _foresee(self, info: LocalUpdateInfo, announced: TensorList) -> None:
        """Judge what the headers of files say, before their tensors are read."""
        assert self._intake is not None
        is_drafters = self._intake.is_drafters
        source = self._sources["draft" if info.draft else "path"]
        are_all = info.path is not None and info.path == source
        self._intake.foresee_files(
            announced,
            are_all=are_all and info.draft == is_drafters,
            is_open=self._is_open,
        )

    def _between(self, num_carried: int) -> None:
        """Between two tensors that are carried over; their bytes so far."""
        self._rest(num_carried)

    def _between_proofs(self, num_bytes: int) -> None:
        """Between two batches of a proof; the bytes that it has written so far."""
        self._num_proved = num_bytes
        self._rest()

    def _between_moves(self, num_bytes: int) -> None:
        """While the way back is moved; the bytes of it so far."""
        self._stager.keep_up()
        self._num_moved = num_bytes
        self._rest()

    def _init_transport(self, transport: Any, init_info: Any) -> None:
        try:
            info = transport.parse_init_info(init_info)
        except ValueError as error:
            why = unknown_field(transport.init_info_cls, "init_info", init_info)
            raise Malformed(why or str(error)) from error
        transport.init_transfer_engine(info)
        if getattr(getattr(transport, "model_update_group", None), "disabled", False):
            # Upstream's communicator then does nothing at all where it should receive,
            # and whatever the memory held before would be served.
            transport.shutdown()
            raise TransferFault(
                "upstream's NCCL communicator has disabled itself, so no weight would "
                "arrive: vLLM could not load NCCL, lacks a function of it (it wants "
                "2.29.7 or newer), or was told VLLM_DISABLE_PYNCCL=1; mend that, or "
                "use the backend inflight_nccl"
            )

    # ---------------------------------------------------------------- helpers
    def _choose(self, name: str) -> Any:
        if name in messages.TRANSPORTS:
            return self._prepared(getattr(self._stager, name))
        if self._worker.weight_transfer_engine is None:
            raise NoTransport("no weight transfer backend is configured")
        transport = self._worker.weight_transfer_engine
        if isinstance(transport, StagedEngine):
            self._prepared(transport)
        return transport

    def _prepared(self, transport: StagedEngine) -> StagedEngine:
        """A transport of ours, which knows this update and its room."""
        transport.cancelled = self._is_cancelled
        transport.most_bucket_bytes = self._stager.most_bucket_bytes
        return transport

    def _take_break(self) -> None:
        """Rest from a slice of Python: decoding shares the interpreter's lock."""
        if self._is_cancelled():
            raise Cancelled("the update was aborted")
        self._pace.take_break()

    def _rest(self, num_carried: int = 0) -> None:
        """Rest from the bytes that were written so far, in any way."""
        if self._is_cancelled():
            raise Cancelled("the update was aborted")
        num_received = 0 if self._intake is None else self._intake.num_bytes
        self._pace.rest(self._num_beside + num_received + num_carried)

    @property
    def _num_beside(self) -> int:
        """Bytes that were written beside those that were received."""
        return self._num_proved + self._num_moved

    def _wait_for_others(self) -> None:
        """A transport that cannot be interrupted may still write its last bytes."""
        while self._before:
            if self._is_cancelled():
                raise Cancelled("the transfer before this one has not let go")
            self._before[0].join(POLL_S)
            self._before = [job for job in self._before if job.is_alive()]
            if self._before:
                self._tell_what_holds(self._before[0].holder)
        self._tell_free()

    def _waits_for(self, method: str, thread: threading.Thread) -> bool:
        """Whether to wait for a thread of a method that has returned."""
        self._loader = method, thread
        self._tell_what_holds(self.holder)
        return not self._is_cancelled()

    def holder(self) -> str:
        """What this thread and those after it wait for: itself, or a thread of its
        method."""
        if (loader := self._loader) is None:
            return f"the thread of an aborted update, which is at {where_is(self)}"
        method, thread = loader
        at = where_is(thread)
        return f"{thread.name}, a thread of {method}, which is at {at}"

    def _tell_what_holds(self, holder: Callable[[], str]) -> None:
        """Tell what this thread waits for, after `HELD_S` and then again and again."""
        now = time.monotonic()
        self._held_told = self._held_told or now
        if now < self._held_told + HELD_S:
            return
        self._held_told, what = now, holder()
        if self._status.held_by is None:
            waits = "update %d waits on rank %d for %s"
            logger.warning(waits, self.serial, self._rank, what)
        self._post(held_by=what)

    def _tell_free(self) -> None:
        """This thread waits no more."""
        self._held_told = self._loader = None
        self._status = replace(self._status, held_by=None)

    def _leave(self, error: InflightError) -> None:
        """Clean up after a failure, then tell; the live weights were never touched."""
        intake = self._intake
        try:
            if self._door is not None:
                self._door.bring_home(unregistered=True)
                self._stager.extension.put_source_back()
            if intake is not None:
                intake.coverage.unwatch()
                if self._is_open and not isinstance(self._transport, StagedEngine):
                    # It may have written past the door, where nobody watches.
                    self._shadow.stale.update(self._shadow.required)
            if self._transport_open:
                self._shadow.reset()
            if self._transport_open or isinstance(self._transport, StagedEngine):
                # Not part of upstream's contract; a transport may offer it.
                getattr(self._transport, "abort_weight_update", lambda: None)()
        except BaseException:
            logger.exception("cleaning up after update %d failed", self.serial)
        self._status = replace(
            self._status,
            state="failed",
            error=error.to_dict(),
            # An error has the first names alone, and every rank may have other names.
            named=getattr(error, "named", {}),
            unfilled=[] if intake is None else intake.unfilled,
        )
        try:
            self._post()
        except BaseException:
            # The rest of the status cannot be posted; that the update failed has to be.
            logger.exception("the status on update %d was not posted", self.serial)
            post_failure(self._board, self._rank, self.serial, error)

    def _is_cancelled(self) -> bool:
        return self._process_ends or self._board.cancelled() >= self.serial

    def _progress(self, num_bytes: int, num_tensors: int) -> None:
        is_first = not self._status.bytes  # what follows may be long in coming
        self._status = replace(self._status, bytes=num_bytes, tensors=num_tensors)
        if is_first or time.monotonic() - self._posted > POLL_S:
            self._post()
        self._pace.rest(self._num_beside + num_bytes)

    def _post(self, **facts: Any) -> None:
        """Post the status, with these fields changed and those of the moment."""
        self._posted = time.monotonic()
        if isinstance(self._transport, StagedEngine):
            facts |= self._transport.gauges
        # The thread belongs to this update alone, so its processor time does, too.
        self._status = replace(self._status, cpu_s=time.thread_time(), **facts)
        try:
            self._board.post(self._rank, self._status.to_dict())
        except ValueError:  # there are so many names that they do not fit
            if self._status.state == "staged" and self._status.shares is not None:
                # What no rank serves as a copy would keep its old bits unnoticed.
                raise DeltaUnsupported(
                    f"the delta changes {len(self._status.unfilled or ())} tensors "
                    f"that rank {self._rank} does not serve, too many to name; send "
                    "the whole version"
                ) from None
            self._status = replace(self._status, named=None, unfilled=None)
            self._board.post(self._rank, self._status.to_dict())
