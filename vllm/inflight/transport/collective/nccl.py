"""A group over NCCL: GPU memory, on a stream of its own, while decoding goes on.

The communicator is non-blocking: after each call, its state is polled until the call is
done. So a dead peer costs a wait that ends. It never blocks the whole device, which
would stop decoding too.
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
from vllm.inflight.transport.collective.rendezvous import Member, read_key
from vllm.inflight.transport.group import LARGE, Pending, group_ended, naming_the_peer
from vllm.inflight.transport.waiting import WaitLimit

UNIQUE_ID = "nccl_id"
CLOSE_S = 2.0
DRAIN_S = 2.0

_undrained: dict[int, tuple[torch.cuda.Stream, object]] = {}
"""Buffers that a kernel of an aborted group may still write, by stream. They are kept
until the kernel ends. The process owns them: the group that started the kernel is gone,
and freed memory could be given to any engine of the process. Several threads add and
remove entries, each one by one."""


def keep_until_drained(stream: torch.cuda.Stream, memory: object) -> None:
    """Keep a reference to `memory` until the kernels on `stream` have ended."""
    _undrained[id(stream)] = stream, memory  # kept alive, so its id stays unique


def still_writes() -> bool:
    """Whether a kernel of an aborted group is still running."""
    for key, (stream, _) in list(_undrained.items()):
        if stream.query():
            _undrained.pop(key, None)
    return bool(_undrained)


class NcclGroup:
    """Implements `Group`."""

    large = LARGE

    def __init__(
        self,
        rendezvous: Member,
        device: torch.device,
        limit: WaitLimit,
        *,
        max_ctas: int | None,
    ) -> None:
        self.terms = rendezvous.terms
        self.device = device
        self.ended: str | None = None
        self._rendezvous = rendezvous
        self._nccl = Library()
        # Guards the handle, because another thread may abort.
        self._lock = threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        self._under_way: deque[tuple[torch.cuda.Event, Sequence[torch.Tensor]]] = (
            deque()
        )
        # Torch's default priority is CUDA's lowest, so decoding goes first.
        self._stream = torch.cuda.Stream(device)
        try:
            self._connect(limit, max_ctas)
        except BaseException as error:
            self.abort(str(error))
            raise

    def _connect(self, limit: WaitLimit, max_ctas: int | None) -> None:
        with naming_the_peer(self._rendezvous.liveness):
            unique = UniqueId.from_buffer_copy(self._agree(limit))
            with self._environment():
                self._open(unique, limit, max_ctas)

    def _open(self, unique: UniqueId, limit: WaitLimit, max_ctas: int | None) -> None:
        comm = ctypes.c_void_p()
        settings = config(self._nccl.version, max_ctas=max_ctas)
        with torch.cuda.device(self.device):
            self._nccl.call(
                "ncclCommInitRankConfig",
                ctypes.byref(comm),
                self.terms.world_size,
                unique,
                self._rendezvous.rank,
                ctypes.byref(settings),
            )
            self._comm = comm
            limit.until(self._is_accepted, "NCCL to connect all ranks")

    def _agree(self, limit: WaitLimit) -> bytes:
        """The communicator's id, which the trainer makes and leaves in the store."""
        store = self._rendezvous.store
        if self._rendezvous.rank == 0:
            store.set(UNIQUE_ID, self._nccl.unique_id().hex())
        name = read_key(store, UNIQUE_ID, limit, "the trainer's NCCL id")
        return bytes.fromhex(name.decode())

    def _environment(self) -> AbstractContextManager[None]:
        """A context around opening the communicator, after all ranks have its id.

        By default it does nothing, because the caller may have set the environment.
        """
        return nullcontext()

    def broadcast(self, buffers: Sequence[torch.Tensor], limit: WaitLimit) -> Pending:
        """Begin to send or receive on the group's stream; see `Group.broadcast`."""
        self.follow()
        event = torch.cuda.Event()
        self._under_way.append((event, buffers))
        with torch.cuda.device(self.device), naming_the_peer(self._rendezvous.liveness):
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
            # Before that, the kernel may not be on the stream, and an event recorded
            # there would not wait for it.
            limit.until(self._is_accepted, "NCCL to begin a broadcast")
            event.record(self._stream)

        def ready() -> bool:
            if self.ended is not None:
                raise group_ended(self.ended)
            if event.query():
                while self._under_way and self._under_way[0][0].query():
                    self._under_way.popleft()
                return True
            # Checked after completion: a peer may leave once it has sent everything.
            self._is_idle()
            self._check_peers()
            return False

        return ready

    def follow(self) -> None:
        """Let the group's stream wait for the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def abort(self, reason: str) -> None:
        """Stop the kernels under way; their buffers are kept until the kernels end."""
        if self._end("ncclCommAbort", reason):
            self._drain()

    def close(self) -> None:
        """Leave the group; aborts if NCCL cannot finish because peers are gone."""
        if self.ended is not None:
            return
        if self._rendezvous.rank:
            # No broadcast is under way. `ncclCommFinalize` would wait for the trainer,
            # which may stay.
            self.abort("has left the group")
            return
        try:
            with self._lock:
                self._nccl.call("ncclCommFinalize", self._handle())
            # Not _is_accepted: peers that leave too are no fault now.
            WaitLimit(CLOSE_S).until(self._is_idle, "NCCL to finish")
        except TransferFault:
            self.abort("has left the group")
        else:
            self._end("ncclCommDestroy", "has left the group")

    # ---------------------------------------------------------------- helpers
    def _is_idle(self) -> bool:
        """Whether NCCL has no call in progress; raises if one failed."""
        with naming_the_peer(self._rendezvous.liveness), self._lock:
            return self._nccl.state(self._handle())

    def _is_accepted(self) -> bool:
        """Whether NCCL has accepted the last call; raises if a peer is gone."""
        if self._is_idle():
            return True
        self._check_peers()
        return False

    def _check_peers(self) -> None:
        fault = self._rendezvous.liveness.fault()
        if fault is not None:
            raise group_ended(fault)

    def _handle(self) -> ctypes.c_void_p:
        if self._comm is None:
            raise group_ended(self.ended or "it was not opened")
        return self._comm

    def _end(self, function: str, reason: str) -> bool:
        """End the communicator with an NCCL function; False if it had ended before."""
        with self._lock:
            if self.ended is not None:
                return False
            self.ended = reason
            comm, self._comm = self._comm, None
            self._rendezvous.end(reason)
            if comm is not None:
                # An error of NCCL while it is ended adds nothing to `reason`.
                with suppress(TransferFault):
                    self._nccl.call(function, comm)
        return True

    def _drain(self) -> None:
        try:
            WaitLimit(DRAIN_S).until(self._stream.query, "the transfer stream")
        except TransferFault:
            keep_until_drained(self._stream, list(self._under_way))
        self._under_way.clear()
