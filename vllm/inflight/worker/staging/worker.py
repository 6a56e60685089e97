"""One rank's side of staging: commands come in, a thread of its own carries them out.

Orders come from the engine core as RPCs that only enqueue; what becomes of them
is posted on the board. The stager lives as long as its worker and holds the
shadow weights; each update has a staging thread (thread.py) that loads them.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from vllm.inflight import messages, upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import (
    Cancelled,
    EngineAsleep,
    EngineFault,
    TransferFault,
)
from vllm.inflight.messages import FlipTo
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.buckets.buffers import (
    ONE_SET_BUCKETS,
    one_set_bucket_bytes,
)
from vllm.inflight.transport.collective.nccl import still_writes
from vllm.inflight.transport.cuda_ipc.receiver_engine import ExportedEngine
from vllm.inflight.transport.files.receiver_engine import LocalEngine
from vllm.inflight.transport.rank_numbers import rank_in_engine
from vllm.inflight.transport.sglang.checkpoint_engine import CheckpointEngine
from vllm.inflight.transport.torch_groups.receiver_engine import GroupsEngine
from vllm.inflight.transport.waiting import never
from vllm.inflight.worker import replay_plan
from vllm.inflight.worker.catalogue import catalogue
from vllm.inflight.worker.delta import dense, device_writer
from vllm.inflight.worker.delta.destinations import KnownDestinations
from vllm.inflight.worker.delta.fill import Filled
from vllm.inflight.worker.integrity.scrub import (
    Digests,
    Layout,
    Scrub,
    copies,
    digests_of,
    marks_of,
)
from vllm.inflight.worker.model.layers import parameters_by_name
from vllm.inflight.worker.shadow import swap
from vllm.inflight.worker.shadow.change_log import Keeping
from vllm.inflight.worker.shadow.flip import Flip, flip_of
from vllm.inflight.worker.shadow.log_entries import LogEntries
from vllm.inflight.worker.shadow.shadow_model import ShadowModel
from vllm.inflight.worker.staging.adopted.extension import ExtensionCalls
from vllm.inflight.worker.staging.thread import StagingThread, post_failure
from vllm.inflight.worker.staging.throttle import undirected
from vllm.inflight.worker.status_board import StatusBoard
from vllm.inflight.worker.step_tracker import StepTracker
from vllm.inflight.worker.verify import drift
from vllm.inflight.worker.verify.content import Content, Facts
from vllm.inflight.worker.verify.drift import Drift
from vllm.inflight.worker.worker_state import WorkerState

logger = upstream.init_logger(__name__)

Made = TypeVar("Made", bound=StagedEngine)

NOT_LET_GO = (
    "a transfer, or the connection of one, has not let go of the shadow weights, so "
    "nothing may change under it; try again later"
)
LET_GO_S = 10.0
"""Time that is left to a transfer that has been told to end."""

MOST_AHEAD = 2
"""Copies that a GPU has before it while one runs. A step's own copies wait for them."""


Sent = tuple[str, frozenset[str]]
"""A framework, and the parameters that a version of it has written."""


@dataclass(frozen=True, slots=True)
class Held:
    """A version that this rank holds; None stands for what is not known.

    Attributes:
        content: tensor by tensor.
        marks: the digests of parameters that are no copies; see scrub.py.
        flip: what exchanges it with what is served; None for the start weights.
        sent: if a framework has sent it.

    """

    content: Content | None = None
    marks: Digests | None = None
    flip: Flip | None = None
    sent: Sent | None = None


class Versions(NamedTuple):
    """The versions that a rank holds.

    A second set is that of `before` or of `staged`; an update gives `before` up as it
    writes. A log may hold both.
    """

    served: Held = Held()
    before: Held | None = None
    staged: Held | None = None


class StagingWorker:
    """The shadow weights of one rank, and the thread that fills them."""

    def __init__(self, worker: upstream.WorkerBase, shadow: ShadowModel) -> None:
        self.worker = worker
        self.shadow = shadow
        self.steps = StepTracker(shadow.device)
        self.versions = Versions()
        self._undo: tuple[Flip, Versions] | None = None
        """What undoes the last flip, and the versions before it."""
        self._turn = threading.Lock()
        """Of the thread that flips, and the one that begins to write; whoever replaces
        `versions` has it, too."""
        self._scrub: Scrub | None = None
        self._laying = threading.Lock()
        """Of the thread that works `_layout` out: one that stages, or that decodes."""
        self._layout: Layout | None = None
        """Where what is served, if that was asked or a version was staged."""
        self._board: StatusBoard | None = None
        self._job: StagingThread | None = None
        self._num_kept = 0
        self.sent_by: dict[str, frozenset[str]] = {}
        """Framework → the parameters that its last committed version has written."""
        self._sent_before = dict(self.sent_by)
        """The same before the last flip."""
        self.doubted: dict[str, frozenset[str]] = {}
        """Framework → the parameters of a first version that was rejected because it
        lacks some of a part of the model; the same once more is accepted."""
        self._sent: Sent | None = None
        """The same of the version that is staged next."""
        self._catalogue: dict[str, Any] | None = None
        """What a trainer may send, packed; None before the ranks are attached."""
        self._stream: torch.cuda.Stream | None = None
        if worker.device.type == "cuda":
            # A thread begins on the default stream, which waits for all others.
            self._stream = torch.cuda.Stream(worker.device)
        self._ahead = deque[torch.cuda.Event]()
        """What `keep_up` has marked and not waited for."""

    @functools.cached_property
    def rank(self) -> int:
        """The number of this rank within its engine, from 0; its place on the board."""
        return rank_in_engine(self.worker.vllm_config.parallel_config)

    @functools.cached_property
    def groups(self) -> GroupsEngine:
        """The groups that trainers of other frameworks have opened."""
        return self._made(GroupsEngine, "groups")

    @functools.cached_property
    def local(self) -> LocalEngine:
        """What reads files: the configured transport, if that is what it does."""
        configured = self.worker.weight_transfer_engine
        if isinstance(configured, LocalEngine):
            return configured
        return self._made(LocalEngine, "local")

    @functools.cached_property
    def exported(self) -> ExportedEngine:
        """What reads tensors that a trainer has exported with torch."""
        return self._made(ExportedEngine, "inflight_ipc")

    @functools.cached_property
    def checkpoint_engine(self) -> CheckpointEngine:
        """What reads the buffers of a checkpoint-engine."""
        return self._made(CheckpointEngine, "inflight_ipc")

    @functools.cached_property
    def extension(self) -> ExtensionCalls:
        """What calls the methods of the worker's extension."""
        made = self._made(ExtensionCalls, "local")
        made.worker = self.worker
        return made

    @property
    def bucket_bytes(self) -> int:
        """Most bytes of a GPU that buckets take beside one set of weights.

        They are left out of the KV cache's budget, since a transport opens later.
        """
        if self.worker.device.type != "cuda":
            return 0
        return ONE_SET_BUCKETS * (self.most_bucket_bytes or 0)

    @property
    def most_bucket_bytes(self) -> int | None:
        """Most bytes of a bucket beside one set of weights; None with two sets."""
        shadow = self.shadow
        return None if shadow.log is None else one_set_bucket_bytes(shadow.nbytes)

    def note_sent(self, framework: str, params: Iterable[str]) -> None:
        """Note which parameters the staged version has written."""
        self._sent = framework, frozenset(params)

    def _made(self, kind: type[Made], backend: str) -> Made:
        config = upstream.WeightTransferConfig(backend=backend)
        worker = self.worker
        return kind(config, worker.vllm_config, worker.device, self.shadow.module)

    def names(self) -> dict[str, Any] | None:
        """What a trainer may send; see catalogue.py."""
        return self._catalogue

    @contextmanager
    def staging_stream(self) -> Iterator[None]:
        """The device and the stream of the staging thread."""
        if self._stream is None:
            # The CPU is a thread's default anyway. To say so would send every call of
            # torch through Python; see throttle.py.
            yield
            return
        with (
            torch.device(self.worker.device),
            torch.cuda.device(self.worker.device),
            torch.cuda.stream(self._stream),
        ):
            yield

    def drain(self) -> None:
        """Return when all that the staging thread has enqueued is done."""
        if self._stream is not None:
            self._mark().synchronize()
            self._ahead.clear()

    def keep_up(self) -> None:
        """Return when of the last calls of this only `MOST_AHEAD` have work that waits.

        The GPU copies on while this thread waits for the interpreter's lock.
        """
        if self._stream is not None:
            self._ahead.append(self._mark())
            if len(self._ahead) > MOST_AHEAD:
                self._ahead.popleft().synchronize()

    def _mark(self) -> torch.cuda.Event:
        """The end of all that is enqueued by now; to wait for it takes no core."""
        end = torch.cuda.Event(blocking=True)
        end.record(self._stream)
        return end

    @property
    def is_busy(self) -> bool:
        """Whether an update is being staged, or has not let go yet."""
        return self._job is not None and bool(self._job.alive())

    def attach(self, board_path: str, num_ranks: int) -> dict[str, Any]:
        """Open the board; tell what this rank can do."""
        if self.rank >= num_ranks:
            raise ValueError(
                f"it has {num_ranks} ranks, and this is number {self.rank}"
            )
        self._board = StatusBoard(board_path, num_ranks)
        if self.shadow.reason is None:
            parallel = self.worker.vllm_config.parallel_config
            is_cut = parallel.tensor_parallel_size > 1
            self._catalogue = catalogue(self.shadow, is_cut=is_cut)
            self._warm()
        return {
            "rank": self.rank,
            "reason": self.shadow.reason,
            "bytes": self.shadow.staging_bytes,
            "host_bytes": self.shadow.host_bytes,
            "bucket_bytes": self.bucket_bytes,
            "dtype": None if self.shadow.reason else self.shadow.served_dtype,
            "has_log": self.shadow.log is not None,
            "unproved": self.shadow.num_unproved,
            "is_reversible": self.shadow.is_reversible,
            "has_drafter": self.shadow.has_drafter,
            "has_mtp": getattr(self.shadow.live, "is_mtp", False),
        }

    def _warm(self) -> None:
        """Compile and load kernels, before there is anything to decode."""
        module, device = self.shadow.module, self.worker.device
        if device.type == "cuda" and module is not None:
            from vllm.inflight.ops.triton_kernels import compiling_at_start

            dtypes = {param.dtype for param in module.parameters()}
            is_logged = self.shadow.log is not None
            with self.staging_stream(), compiling_at_start():
                replay_plan.warm(device, self.shadow.arriving_dtypes, dtypes)
                drift.warm(device)
                largest = self.shadow.start_checkpoint.largest
                has_long = largest is None or largest >= device_writer.MOST_SHORT
                device_writer.warm(
                    device, dtypes, is_logged=is_logged, has_long=has_long
                )
                if is_logged:
                    swap.warm(device, dtypes)
                    dense.warm(device, dtypes)

    def command(self, serial: int, command: messages.Command) -> None:
        """Enqueue one command of update `serial`; the outcome is posted."""
        assert self._board is not None
        if isinstance(command, messages.Miss):  # maybe while another update is staged
            if "groups" in vars(self):
                self.groups.miss(
                    command.group_name, command.announcement, command.age_s
                )
            return
        if self._job is None or self._job.serial < serial:
            try:
                job = StagingThread(self, self._board, serial, predecessor=self._job)
                job.start()
            except Exception as error:  # the host has no room for a thread, say
                # Nobody reads the reply to a command; what is waited for is a status.
                logger.exception("update %d did not begin", serial)
                fault = EngineFault(f"no thread to stage in: {error}")
                post_failure(self._board, self.rank, serial, fault)
                return
            self._job = job
        if self._job.serial == serial:
            if isinstance(command, messages.CallExtension):
                self.extension.usual_device = torch.get_default_device()
            self._job.put(command)

    def open(self, is_cancelled: Callable[[], bool] = never) -> None:
        """The shadow weights are about to be written over: there is no rollback target.

        Args:
            is_cancelled: whether the update that would write is not wanted any more.

        Raises:
            Cancelled: it is not.

        """
        with self.between_flips(is_cancelled):
            self.versions = self.versions._replace(before=None, staged=None)
            self._undo = self._sent = None
            if (log := self.shadow.log) is not None:
                log.drop_kept() if log.keeps else log.clear()

    def begin_log(self, is_cancelled: Callable[[], bool], keeping: Keeping) -> bool:
        """With delta staging, begin to log an update beside the way back.

        Args:
            is_cancelled: whether that update is not wanted any more.
            keeping: what happens to the way back when that is in the way; it calls
                `open` or `move_way_back`.

        Returns:
            whether there is a way back, and it is kept.

        Raises:
            Cancelled: the update is not wanted.

        """
        with self.between_flips(is_cancelled):
            if self.shadow.log is None or self.versions.before is None:
                return False
            self.versions = self.versions._replace(staged=None)
            self._undo = self._sent = None
            self.shadow.log.begin(keeping)
            return True

    def move_way_back(
        self, is_cancelled: Callable[[], bool], entries: LogEntries
    ) -> None:
        """From here on a rollback takes the log of the way back from other memory.

        Args:
            is_cancelled: whether the update that is in its way is not wanted any more.
            entries: of that log, where it was copied to.

        Raises:
            Cancelled: the update is not wanted. A rollback may have come since the log
                was copied.

        """
        self.drain()  # the last copies may be under way
        before = self.versions.before
        assert before is not None and isinstance(before.flip, swap.Swap)
        flip = before.flip.of(entries)
        with self.between_flips(is_cancelled):
            before = replace(before, flip=flip)
            self.versions = self.versions._replace(before=before)

    @contextmanager
    def between_flips(self, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """While no flip can come, for whoever changes the second tree.

        Never in the middle of a flip, nor after one of a rollback: that comes when the
        update has been cancelled, and then nothing is changed any more.

        Args:
            is_cancelled: whether the update that would do so is not wanted any more.

        Raises:
            Cancelled: it is not.

        """
        with self._turn:
            if is_cancelled():
                raise Cancelled("the update was aborted")
            yield

    def forget(self, *, served: bool) -> None:
        """Release the shadow weights, and with `served` the live weights as well."""
        self.open()
        if self.shadow.log is not None:
            self.shadow.log.clear()
        if served:
            with self._turn:
                self.versions = self.versions._replace(served=Held())
            self._scrub = None

    def end_reads(self) -> None:
        """End a scrub, and wait for what is enqueued, before memory is given back.

        On a GPU a read of memory which is not there ends the process. Slices of a scrub
        may be enqueued, and what an aborted update has enqueued may still run.
        """
        self._scrub = None
        self.worker.synchronize_device()

    def fall_asleep(self, *, keeps_weights: bool) -> None:
        """Release the shadow weights, and the log, as the live weights fall asleep.

        Args:
            keeps_weights: whether the live weights come back with their content.

        """
        self.forget(served=not keeps_weights)
        self.shadow.stale.update(self.shadow.required)
        if self.shadow.log is not None:
            self.shadow.log.free()

    def unmap(self) -> None:
        """Let a trainer have memory that it has freed, unless an update is under way.

        Of an aborted update, the end is awaited.
        """
        if self._job is not None and self._job.is_ending:
            self._job.ends_by(time.monotonic() + LET_GO_S)
        transport = self.worker.weight_transfer_engine
        if isinstance(transport, StagedEngine) and not self.is_busy:
            try:
                transport.unmap()
            except TransferFault:  # a sleep or a wake-up may still succeed
                logger.exception("a trainer's memory stays mapped")

    def let_go(self) -> None:
        """Return when nothing is at work on the shadow weights.

        Raises:
            EngineFault: something goes on for more than `LET_GO_S`.

        """
        if self._job is not None and not self._job.ends_by(time.monotonic() + LET_GO_S):
            holders = "".join(f"; it is {j.holder()}" for j in self._job.alive()[:1])
            raise EngineFault(f"{NOT_LET_GO}{holders}")
        if still_writes():
            raise EngineFault(NOT_LET_GO)

    @property
    def served(self) -> Content | None:
        """What is served, tensor by tensor, if that is known."""
        return self.versions.served.content

    def begin_fill(self) -> None:
        """An update begins to fill lost weights in place, with delta staging."""
        if (tripwire := WorkerState.of(self.worker).tripwire) is not None:
            tripwire.begin_fill()

    def staged(
        self,
        content: Content | None,
        log_number: int | None = None,
        *,
        marks: Digests | None = None,
        fills: bool = False,
    ) -> dict[str, object] | None:
        """The shadow weights are whole: a flip may exchange them with the live ones.

        Args:
            content: of the staged version.
            log_number: with delta staging, the number of the log since the update began
                to compare with the live weights.
            marks: with delta staging, digests of the parameters that are no copies,
                and were loaded for it.
            fills: whether lost weights were filled in place.

        Returns:
            its drift from what is served.

        Raises:
            EngineFault: somebody else has written into the live weights since.

        """
        moved: Drift | None = None
        old = None if self.served is None else self.served.samples
        if old is not None and content is not None and content.samples is not None:
            with undirected():
                moved = Drift(old, content.samples)
        with undirected():
            flip: Flip = Filled() if fills else self.make_flip()
        module = self.shadow.module
        assert module is not None
        facts = self._facts(content)
        log = self.shadow.log
        with self._laying, undirected():
            layout = self._where()
            copied = copies(layout, facts)
            if log is None:
                marks = marks_of(layout, module, copied)
            else:  # every other parameter is a copy
                marks = self._unsent_marks() | (marks or {})
            layout.slices(copied)  # decoding would wait for it later
            if fills:
                self._require_filled(layout, facts, marks)
        with self._turn:
            # Whoever empties the log has forgotten what is served, too.
            if log is not None and log.number != log_number:
                raise EngineFault(
                    "something else has written into the live weights while the update "
                    "was compared with them; send it again"
                )
            held = Held(content, marks, flip, self._sent)
            self.versions = self.versions._replace(staged=held)
            self._sent = None
        self._settle_garbage()
        return None if moved is None else moved.result()

    def _unsent_marks(self) -> Digests:
        """With delta staging, digests of the served parameters that are no copies."""
        paths = {name.rpartition(".")[0] for name in self.shadow.quantised}
        computed = set().union(*self.shadow.computed.values())
        return {
            name: mark
            for name, mark in (self.versions.served.marks or {}).items()
            if name in computed or name.rpartition(".")[0] in paths
        }

    def _require_filled(
        self, layout: Layout, facts: Mapping[str, Facts], marks: Digests
    ) -> None:
        """Read filled weights back, and compare them with what was received.

        Args:
            layout: of the rank.
            facts: of the tensors that were received.
            marks: digests of the parameters that are no copies.

        Raises:
            EngineFault: a tensor that this rank has all of is another one.

        """
        if (tripwire := WorkerState.of(self.worker).tripwire) is not None:
            tripwire.end_fill()  # what is written from here on is noticed
        wrong = Scrub(layout, facts, None).differing() if facts else []
        live = parameters_by_name(self.shadow.live)
        filled = digests_of([(name, live[name].data) for name in marks], layout.device)
        wrong += [name for name, mark in marks.items() if filled[name] != mark]
        if wrong:
            raise EngineFault(
                f"{wrong[0]} was filled in and reads back as something else; somebody "
                "else has written into the weights meanwhile, so send the version again"
            )

    def make_flip(self) -> Flip:
        """The flip of live and shadow weights, prepared before it is needed."""
        return flip_of(self.shadow)

    def _settle_garbage(self) -> None:
        """Keep what is remembered for good out of the collections of garbage.

        What a plan is made of stays as long as the engine. With ten thousand tensors a
        collection that looks through it stops decoding for 60 ms.
        """
        assert self.shadow.module is not None
        num_kept = len(self.shadow.plan) + len(self.shadow.views)
        num_kept += len(KnownDestinations.of(self.shadow.module))
        if num_kept != self._num_kept:
            self._num_kept = num_kept
            gc.collect(1)  # the younger garbage; all of it would be such a stop
            gc.freeze()

    def flip(self, to: FlipTo = "next") -> float:
        """Exchange the live weights with others; returns the seconds it took.

        An update that was aborted after it was staged may still lie here.
        """
        with self._turn:
            flip, after, undo = self._turned(to)
            with self.steps.between():
                seconds = flip()
            is_commit = to == "next"
            self.versions, self._undo = after, undo
            if (log := self.shadow.log) is not None:
                # What an update has compared with the live weights is true no more.
                log.number += 1
                log.holds_way_back |= is_commit
                log.holds_way_back &= after.staged is None
            if not self.shadow.is_reversible:
                # The one set was copied over the other.
                self.shadow.stale.clear()
                self.shadow.changed.clear()
            self._scrub = None
            if to == "undo":
                self.sent_by = self._sent_before
            self._sent_before = dict(self.sent_by)
            if is_commit and (sent := after.served.sent) is not None:
                framework, params = sent
                self.sent_by[framework] = params
        return seconds

    def _turned(
        self, to: FlipTo
    ) -> tuple[Flip, Versions, tuple[Flip, Versions] | None]:
        """A flip, the versions after it, and what undoes it."""
        versions = self.versions
        if to == "undo":
            if self._undo is None:
                raise RuntimeError("nothing was flipped on this rank")
            return *self._undo, None
        # A commit never takes another version than the staged one.
        one = versions.staged if to == "next" else versions.before
        if one is None or one.flip is None:
            what = "staged" if to == "next" else "left to return to"
            raise RuntimeError(f"nothing is {what} on this rank")
        if not self.shadow.is_reversible:
            return one.flip, Versions(one), None
        before = replace(versions.served, flip=one.flip)
        return one.flip, Versions(one, before), (one.flip, versions)

    def scrub(self, move: str) -> Any:
        """One move of a scrub of what is served, between two steps; see scrub.py.

        Args:
            move: `begin` replies with the number of slices, or None while the thread
                that stages works out where things are; `slice` reads one; `result`
                replies with what was found, or None if what is served has changed.

        Raises:
            EngineAsleep: a scrub shall begin, and the weights of this worker sleep.

        """
        with torch.cuda.stream(self.steps.stream):  # of None: the current one
            if move == "begin":
                self._scrub = None
                tripwire = WorkerState.of(self.worker).tripwire
                if tripwire is not None and tripwire.is_asleep:
                    raise EngineAsleep("the weights of this worker are asleep")
                # Decoding does not wait for it: whoever scrubs asks again.
                if not self._laying.acquire(blocking=False):
                    return None
                try:
                    served = self.versions.served
                    layout = self._where(may_change=not self.is_busy)
                    facts = self._facts(served.content)
                    self._scrub = Scrub(layout, facts, served.marks)
                finally:
                    self._laying.release()
                return self._scrub.num_slices
            if self._scrub is None:
                return None
            if move == "slice":
                return self._scrub.slice()
            found = self._scrub.result()
            marks = found.pop("marks")
            # Of the start, and of what staging left out: what comes later is compared.
            # Decoding does not wait for who stages; the next scrub marks in that case.
            if self._turn.acquire(blocking=False):
                try:
                    served = self.versions.served
                    served = replace(served, marks=marks | (served.marks or {}))
                    self.versions = self.versions._replace(served=served)
                finally:
                    self._turn.release()
            self._scrub = None
            return found

    def _where(self, *, may_change: bool = True) -> Layout:
        """Where what is served; worked out again when the plan has changed.

        Args:
            may_change: whether it is; not by a thread that decodes, while another one
                still records what loaders do.

        """
        plan, layout = self.shadow.plan, self._layout
        is_old = layout is None or (may_change and layout.plan_number != plan.number)
        if layout is None or is_old:
            with plan.lock:
                layout = self._layout = Layout(self.shadow)
        return layout

    def _facts(self, content: Content | None) -> Mapping[str, Facts]:
        """Of a version; none if its tensors were not digested."""
        config = InflightConfig.of(self.worker.vllm_config)
        if content is None or config.verify == "off":
            return {}
        return content.facts

    def close(self) -> None:
        """End the job and let the board go."""
        if self._board is None:
            return
        if self._job is not None:
            self._board.cancel(self._job.serial)
            self._job.join(timeout=1.0)
        for made in {"groups", "local"} & vars(self).keys():
            getattr(self, made).shutdown()
        # A job that cannot be interrupted may still post: leave it its memory.
        if not self.is_busy:
            self._board.close()
        self._board = None
