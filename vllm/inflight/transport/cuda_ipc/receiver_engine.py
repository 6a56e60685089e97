"""Backend `inflight_ipc`: a trainer on this host lends its tensors, which workers copy.

The trainer sends no tensors: each worker maps the trainer's GPU memory and copies from
it. Copy engines carry copies from another GPU, which leaves all processors to decoding.
There is no group, and a trainer that dies breaks nothing. The `update_info` has
upstream's `names`, `dtype_names` and `shapes`, and `exports` (see handles.py). When the
call has returned, the tensors may change again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import EngineFault, Malformed, TransferFault
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.buckets.buffers import ONE_SET_BUCKETS
from vllm.inflight.transport.buckets.plan import Bucket, plan
from vllm.inflight.transport.buckets.receiver import Incoming, Receiver
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.cuda_ipc.driver import CudaMemory, SharedMemory
from vllm.inflight.transport.cuda_ipc.handles import Exports, Mappings
from vllm.inflight.transport.cuda_ipc.lent_tensors import LentTensors, are_aligned
from vllm.inflight.transport.group import CopyGroup, Pending, Terms, group_ended
from vllm.inflight.transport.waiting import WaitLimit, check_timeout

EXPORTED_BUCKET_BYTES = 64 << 20
"""The size of each of the two buckets of an `ExportedEngine`."""
SHORT_S = 0.1
"""Longer than a thread takes to see that it has nothing to unmap."""
PEERS = 2
"""The `world_size` of the terms: a worker and its trainer."""


@dataclass(kw_only=True)
class IpcInitInfo(upstream.WeightTransferInitInfo):
    """How a worker reads.

    Raises:
        ValueError: a field is out of range; the message names it.

    """

    bucket_bytes: int = 256 << 20
    """The size of a bucket, whose tensors are checked together; a multiple of 256."""
    num_buckets: int = 3
    """The number of buckets, for tensors whose destination is not known."""
    timeout_s: float = 120.0
    """Longest wait for each bucket, in seconds."""

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        if type(self.num_buckets) is not int or self.num_buckets < 1:
            raise ValueError(
                f"num_buckets must be a whole number, at least 1: {self.num_buckets!r}"
            )
        _ = self.terms

    @property
    def terms(self) -> Terms:
        """The terms for a `Receiver`; raises `ValueError`."""
        return Terms(wire="ipc", world_size=PEERS, bucket_bytes=self.bucket_bytes)


@dataclass
class IpcUpdateInfo(upstream.WeightTransferUpdateInfo):
    """The tensors that are lent, and their places.

    Raises:
        ValueError: a field cannot be read; the message names it.

    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    exports: dict[str, Any]
    tensor_list: TensorList = field(init=False, repr=False)
    lent: Exports = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.tensor_list = TensorList.parse(self.names, self.dtype_names, self.shapes)
        self.lent = Exports.parse(self.exports, len(self.names))


class Reader(CopyGroup):
    """Implements `Group` with one rank: `broadcast` copies the next bucket."""

    large = 1  # each tensor is copied on its own

    def __init__(
        self, terms: Terms, device: torch.device, memory: SharedMemory
    ) -> None:
        super().__init__(terms, device)
        self._memory = memory
        self._buckets: Iterator[Bucket] = iter(())
        self._addresses: Sequence[int] = ()

    def begin(self, tensor_list: TensorList, addresses: Sequence[int]) -> None:
        """Copy these tensors next, bucket by bucket."""
        self.ended = None
        self._buckets = iter(
            plan(tensor_list.sizes, self.terms.bucket_bytes, large=self.large)
        )
        self._addresses = addresses

    def broadcast(self, buffers: Sequence[torch.Tensor], limit: WaitLimit) -> Pending:
        """Begin to copy the next bucket, each message into one of `buffers`."""
        del limit  # enqueueing does not wait
        if self.ended is not None:
            raise group_ended(self.ended)
        self.follow()
        stream = 0 if self._stream is None else self._stream.cuda_stream
        bucket = next(self._buckets, None)
        if bucket is None:
            return _at_once  # the test broadcast, before any tensors
        for message, buffer in zip(bucket.messages, buffers, strict=True):
            target = buffer.data_ptr() - message[0].place
            for piece in message:
                source = self._addresses[piece.tensor] + piece.start
                self._memory.copy(target + piece.place, source, piece.num_bytes, stream)
        if self._stream is None:
            return _at_once
        copied = torch.cuda.Event()
        copied.record(self._stream)
        return copied.query


class IpcEngine(StagedEngine):
    """One worker's end."""

    init_info_cls = IpcInitInfo
    update_info_cls = IpcUpdateInfo

    _timeout_s = 0.0
    _reader: Reader | None = None
    _receiver: Receiver | None = None
    _mappings: Mappings | None = None
    _memory: SharedMemory
    _in_use: Lock
    """Held while tensors are read where they lie. Their memory stays mapped then."""

    def init_transfer_engine(self, init_info: IpcInitInfo) -> None:
        """Allocate the buckets, which tensors without a destination go through.

        Raises:
            Malformed: this worker has no GPU.
            EngineFault: there is no memory for the buckets, or no CUDA driver.

        """
        self.shutdown()
        if self.device.type != "cuda":
            raise Malformed(
                "inflight_ipc reads GPU memory, this engine runs on "
                f"{self.device.type}; use the backend local"
            )
        self._open(init_info, CudaMemory())

    def _open(self, init_info: IpcInitInfo, memory: SharedMemory) -> None:
        if (most := self.most_bucket_bytes) is not None:
            init_info = replace(
                init_info,
                num_buckets=min(init_info.num_buckets, ONE_SET_BUCKETS),
                bucket_bytes=min(init_info.bucket_bytes, most),
            )
        limit = WaitLimit(init_info.timeout_s, self._is_cancelled)
        reader = Reader(init_info.terms, self.device, memory)
        try:
            self._receiver = Receiver(reader, init_info.num_buckets, limit)
        except torch.OutOfMemoryError as error:
            raise EngineFault(
                f"there is no memory for {init_info.num_buckets} buckets of "
                f"{init_info.bucket_bytes} bytes; give smaller or fewer ones"
            ) from error
        self._reader, self._mappings, self._memory = reader, Mappings(memory), memory
        self._in_use = Lock()
        self._timeout_s = init_info.timeout_s

    def start_weight_update(self) -> None:
        """Begin an update, with a wait time of 0."""
        super().start_weight_update()
        if (receiver := self._receiver) is not None:
            receiver.window.total_s = 0.0

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        """Load the tensors that the trainer lends.

        Raises:
            Malformed: the trainer is on another host.
            TransferFault: `init_weight_transfer_engine` was not called, or this GPU
                cannot reach the trainer's.
            Cancelled: the update was cancelled.

        """
        # A worker that ends shuts its transports down, whatever this thread does.
        reader, receiver, mappings = self._reader, self._receiver, self._mappings
        if reader is None or receiver is None or mappings is None:
            raise TransferFault(
                "this worker was not prepared; call init_weight_transfer_engine first"
            )
        tensor_list, lent = update_info.tensor_list, update_info.lent
        limit = WaitLimit(self._timeout_s, self._is_cancelled)
        in_use, own = self._in_use, {self._memory.gpu(self.device)}
        incoming: Incoming | LentTensors | None = None
        try:
            addresses = mappings.find(lent, tensor_list.sizes)
            reader.begin(tensor_list, addresses)
            for event in lent.events:
                with self._memory.event(event) as has_passed:
                    limit.until(has_passed, "work of the trainer's GPU")
            incoming = receiver.tensors(tensor_list, limit)
            if set(lent.gpus) == own and are_aligned(tensor_list, addresses):
                incoming = LentTensors(
                    *(incoming, reader, tensor_list, addresses, in_use),
                    is_mapped=lambda: self._mappings is mappings,
                )
            self.model.load_weights(incoming)
        finally:
            if isinstance(incoming, LentTensors):
                incoming.end()
            reader.close()
            with in_use:
                if self._mappings is not mappings:  # shut down meanwhile
                    mappings.close()

    def finish_weight_update(self) -> None:
        """Pack the last layers, and unmap memory that this update did not name."""
        super().finish_weight_update()
        self._end_update()

    def abort_weight_update(self) -> None:
        """Unmap memory that this update has not named so far."""
        self._end_update()

    def _end_update(self) -> None:
        if (mappings := self._mappings) is not None:
            mappings.end_update()

    def unmap(self) -> None:
        """Remove all mappings; the next update maps what it uses."""
        if (mappings := self._mappings) is not None:
            mappings.close()

    @property
    def gauges(self) -> dict[str, float]:
        """The waits for copies."""
        if (receiver := self._receiver) is None:
            return {}
        window = receiver.window
        return {
            "bucket_wait_ms": round(1e3 * window.waited_s, 3),
            "wire_s": round(window.total_s, 6),
        }

    def shutdown(self) -> None:
        """Free the buckets and the mappings; a thread that receives stops."""
        reader, mappings = self._reader, self._mappings
        self._reader = self._receiver = self._mappings = None
        if reader is not None:
            reader.abort("this transport was shut down")
        if mappings is not None and self._in_use.acquire(timeout=SHORT_S):
            # Else the thread that reads closes them, once it has ended.
            try:
                mappings.close()
            finally:
                self._in_use.release()

    def _is_cancelled(self) -> bool:
        return self.cancelled()


class ExportedEngine(IpcEngine):
    """Receives tensors that a trainer has exported with torch; see torch_exports.py.

    Such a trainer frees its memory, or uses it again, when a call has returned. So
    mappings and buckets last for one call.
    """

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        """Load the tensors of one call.

        Raises:
            Malformed: this worker has no GPU, or the trainer is on another host.
            EngineFault: there is no memory for the buckets.
            TransferFault: this GPU cannot reach the trainer's.
            Cancelled: the update was cancelled.

        """
        self.init_transfer_engine(
            IpcInitInfo(bucket_bytes=EXPORTED_BUCKET_BYTES, num_buckets=2)
        )
        try:
            super().receive_weights(update_info)
        finally:
            self.shutdown()


def _at_once() -> bool:
    return True
