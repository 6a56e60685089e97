"""A group over NCCL: GPU memory, on a stream of its own, beside everything else.

The communicator never blocks: whatever it is told, it is asked afterwards, in short
steps, whether it is done. So a dead peer costs a wait that ends, and never a wait of
the whole device, in which decoding would hang as well.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import (
    AbstractContextManager,
    nullcontext,
    suppress,
)

import torch

from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.collective.nccl_api import UINT8, Library, UniqueId, config
from vllm.inflight.transport.collective.rendezvous import Member, said
from vllm.inflight.transport.group import LARGE, Pending, lost, told_why
from vllm.inflight.transport.waiting import WaitLimit

UNIQUE_ID = "nccl_id"
CLOSE_S = 2.0
DRAIN_S = 2.0

_undrained: dict[int, tuple[torch.cuda.Stream, object]] = {}
"""Memory that a kernel which would not end may still write: not given back. Entries are
added and taken out one by one, since several threads do so."""


def keep_until_drained(stream: torch.cuda.Stream, memory: object) -> None:
    """Hold `memory` until the kernels on `stream` have ended."""
    _undrained[id(stream)] = stream, memory  # which is held here, so the id is its own


def still_writes() -> bool:
    """Whether a kernel of a group that was aborted has not ended yet."""
    for key, (stream, _) in list(_undrained.items()):
        if stream.query():
            _undrained.pop(key, None)
    return bool(_undrained)


class NcclGroup:
    """Implements `Group`."""

    large = LARGE

    def __init__(
        self,
        meeting: Member,
        device: torch.device,
        watch: WaitLimit,
        *,
        max_ctas: int | None,
    ) -> None:
        self.terms = meeting.terms
        self.device = device
        self.ended: str | None = None
        self._meeting = meeting
        self._nccl = Library()
        # Around the handle: abort may come from another thread.
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        self._under_way: deque[tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = (
            deque()
        )
        # Torch's default priority is CUDA's lowest: decoding goes first.
        self._stream = torch.cuda.Stream(device)
        try:
            self._connect(watch, max_ctas)
        except BaseException as error:
            self.abort(str(error))
            raise

    def _connect(self, watch: WaitLimit, max_ctas: int | None) -> None:
        with told_why(self._meeting.lifeline):
            unique = UniqueId.from_buffer_copy(self._agree(watch))
            with self._environment():
                self._open(unique, watch, max_ctas)

    def _open(self, unique: UniqueId, watch: WaitLimit, max_ctas: int | None) -> None:
        comm = ctypes.c_void_p()
        settings = config(self._nccl.version, max_ctas=max_ctas)
        with torch.cuda.device(self.device):
            self._nccl.call(
                "ncclCommInitRankConfig",
                ctypes.byref(comm),
                self.terms.world_size,
                unique,
                self._meeting.rank,
                ctypes.byref(settings),
            )
            self._comm = comm
            watch.until(self._is_settled, "NCCL to connect all ranks")

    def _agree(self, watch: WaitLimit) -> bytes:
        """The name of the communicator, which the trainer has given it."""
        store = self._meeting.store
        if self._meeting.rank == 0:
            store.set(UNIQUE_ID, self._nccl.unique_id().hex())
        name = said(store, UNIQUE_ID, watch, "the trainer's NCCL id")
        return bytes.fromhex(name.decode())

    def _environment(self) -> AbstractContextManager[None]:
        """Around the opening, once all ranks have agreed; whoever makes a group may
        have seen to it."""
        return nullcontext()

    def broadcast(self, buffers: Sequence[torch.Tensor], watch: WaitLimit) -> Pending:
        """Begin to send or receive on the wire's stream; see `Group.broadcast`."""
        self.follow()
        event = torch.cuda.Event()
        self._under_way.append((event, buffers))
        with torch.cuda.device(self.device), told_why(self._meeting.lifeline):
            with self._lock:
                comm, stream = self._handle(), self._stream.cuda_stream
                self._nccl.call("ncclGroupStart")  # one kernel for all of them
                try:
                    for buffer in buffers:
                        place, size = buffer.data_ptr(), buffer.numel()
                        self._nccl.call(
                            "ncclBroadcast", place, place, size, UINT8, 0, comm, stream
                        )
                finally:
                    self._nccl.call("ncclGroupEnd")
            # Until then the kernel may not be on the stream, and an event recorded
            # there would tell nothing of it.
            watch.until(self._is_settled, "NCCL to begin a broadcast")
            event.record(self._stream)

        def ready() -> bool:
            if self.ended is not None:
                raise lost(self.ended)
            if event.query():
                while self._under_way and self._under_way[0][0].query():
                    self._under_way.popleft()
                return True
            # Looked at second: who has sent everything may leave.
            self._is_idle()
            self._check_peers()
            return False

        return ready

    def follow(self) -> None:
        """Let the wire's stream wait for the current one."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def abort(self, reason: str) -> None:
        """End the kernels under way; their buffers are kept until they have."""
        if self._end("ncclCommAbort", reason):
            self._drain()

    def close(self) -> None:
        """Leave; with the others gone NCCL may not end in peace, then it is aborted."""
        if self.ended is not None:
            return
        if self._meeting.rank:
            # Nothing is under way, and NCCL's own farewell would wait for a trainer
            # that stays.
            self.abort("has left the group")
            return
        try:
            with self._lock:
                self._nccl.call("ncclCommFinalize", self._handle())
            # Not _is_settled: that the others leave as well is no fault now.
            WaitLimit(CLOSE_S).until(self._is_idle, "NCCL to finish")
        except TransferFault:
            self.abort("has left the group")
        else:
            self._end("ncclCommDestroy", "has left the group")

    # ---------------------------------------------------------------- helpers
    def _is_idle(self) -> bool:
        """Whether NCCL does nothing in the background; raises if it failed."""
        with told_why(self._meeting.lifeline), self._lock:
            return self._nccl.state(self._handle())

    def _is_settled(self) -> bool:
        """Whether NCCL has taken what it was given; raises if somebody is gone."""
        if self._is_idle():
            return True
        self._check_peers()
        return False

    def _check_peers(self) -> None:
        fault = self._meeting.lifeline.fault()
        if fault is not None:
            raise lost(fault)

    def _handle(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise lost(self.ended or "it was not opened")
        return self._comm

    def _end(self, function: str, reason: str) -> bool:
        """Whether it was this call that ended it."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = reason
            comm, self._comm = self._comm, None
            self._meeting.end(reason)
            if comm is not None:
                # Its own complaint about what is being ended adds nothing.
                with suppress(TransferFault):
                    self._nccl.call(function, comm)
        return True

    def _drain(self) -> None:
        try:
            WaitLimit(DRAIN_S).until(self._stream.query, "the wire's stream")
        except TransferFault:
            keep_until_drained(self._stream, list(self._under_way))
        self._under_way.clear()
