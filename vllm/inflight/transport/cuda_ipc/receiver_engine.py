"""Backend `inflight_ipc`: a trainer on this host lends its tensors, to be copied.

Nobody sends: each worker maps the trainer's GPU memory and reads it, from whatever GPU
it is on; from another one by copy engines, which leave every processor to decoding. A
trainer needs no group, and one that dies meanwhile takes nothing with it. `update_info`
is upstream's `names`, `dtype_names` and `shapes`, and `exports` (see handles.py); when
the call has returned, the tensors may change again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import EngineFault, Malformed, TransferFault
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.buckets.plan import Bucket, plan
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.cuda_ipc.driver import CudaMemory, SharedMemory
from vllm.inflight.transport.cuda_ipc.handles import Exports, Mappings
from vllm.inflight.transport.group import CopyGroup, Pending, Terms
from vllm.inflight.transport.waiting import WaitLimit, check_timeout

PEERS = 2
"""A worker and its trainer."""


@dataclass(kw_only=True)
class IpcInitInfo(upstream.WeightTransferInitInfo):
    """How a worker reads; there is nobody to agree with."""

    bucket_bytes: int = 256 << 20
    """Looked at together, once they are here; a multiple of 256."""
    num_buckets: int = 3
    """How many buckets a worker holds, for tensors whose place it does not know."""
    timeout_s: float = 120.0
    """Longest wait for any one bucket."""

    def __post_init__(self) -> None:
        check_timeout(self.timeout_s)
        if type(self.num_buckets) is not int or self.num_buckets < 1:
            raise ValueError(
                f"num_buckets must be a whole number, at least 1: {self.num_buckets!r}"
            )
        _ = self.terms

    @property
    def terms(self) -> Terms:
        """As a receiver wants them; raises `ValueError`."""
        return Terms(wire="ipc", world_size=PEERS, bucket_bytes=self.bucket_bytes)


@dataclass
class IpcUpdateInfo(upstream.WeightTransferUpdateInfo):
    """What is to be read, and where."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    exports: dict[str, Any]
    announced: TensorList = field(init=False, repr=False)
    lent: Exports = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.announced = TensorList.parse(self.names, self.dtype_names, self.shapes)
        self.lent = Exports.parse(self.exports, len(self.names))


class Reader(CopyGroup):
    """Implements `Group`, alone: what it is to receive, it fetches."""

    large = 1  # each tensor is copied by itself anyhow

    def __init__(
        self, terms: Terms, device: torch.device, memory: SharedMemory
    ) -> None:
        super().__init__(terms, device)
        self._memory = memory
        self._buckets: Iterator[Bucket] = iter(())
        self._addresses: Sequence[int] = ()

    def begin(self, announced: TensorList, addresses: Sequence[int]) -> None:
        """Read these tensors next, bucket by bucket."""
        self.ended = None
        self._buckets = iter(
            plan(announced.sizes, self.terms.bucket_bytes, large=self.large)
        )
        self._addresses = addresses

    def broadcast(self, buffers: Sequence[torch.Tensor], watch: WaitLimit) -> Pending:
        """Begin to copy the next bucket, each of its messages into its buffer."""
        del watch  # to enqueue does not wait
        self.follow()
        stream = 0 if self._stream is None else self._stream.cuda_stream
        bucket = next(self._buckets, None)
        if bucket is None:
            return _at_once  # the receiver's trial, before anything was lent
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

    def init_transfer_engine(self, init_info: IpcInitInfo) -> None:
        """Make the buckets, which what is read for the first time goes through.

        Raises:
            Malformed: this worker has no GPU.
            EngineFault: there is no memory for the buckets, or no driver.

        """
        self.shutdown()
        if self.device.type != "cuda":
            raise Malformed(
                "inflight_ipc reads GPU memory, this engine runs on "
                f"{self.device.type}; use the backend local"
            )
        self._open(init_info, CudaMemory())

    def _open(self, init_info: IpcInitInfo, memory: SharedMemory) -> None:
        watch = WaitLimit(init_info.timeout_s, self._is_cancelled)
        reader = Reader(init_info.terms, self.device, memory)
        try:
            self._receiver = Receiver(reader, init_info.num_buckets, watch)
        except torch.OutOfMemoryError as error:
            raise EngineFault(
                f"there is no memory for {init_info.num_buckets} buckets of "
                f"{init_info.bucket_bytes} bytes; give smaller or fewer ones"
            ) from error
        self._reader, self._mappings = reader, Mappings(memory)
        self._timeout_s = init_info.timeout_s

    def start_weight_update(self) -> None:
        """Nothing of this update was waited for yet, or lent."""
        super().start_weight_update()
        if self._receiver is not None:
            self._receiver.window.total_s = 0.0
        if self._mappings is not None:
            self._mappings.begin()

    def receive_weights(self, update_info: IpcUpdateInfo) -> None:
        """Load what the trainer lends.

        Raises:
            Malformed: it is not of this host.
            TransferFault: `init_weight_transfer_engine` was not called, or this GPU
                cannot reach the trainer's.
            Cancelled: the update is not wanted any more.

        """
        if self._reader is None or self._receiver is None or self._mappings is None:
            raise TransferFault(
                "this worker was not prepared; call init_weight_transfer_engine first"
            )
        announced = update_info.announced
        addresses = self._mappings.find(update_info.lent, announced.sizes)
        self._reader.begin(announced, addresses)
        watch = WaitLimit(self._timeout_s, self._is_cancelled)
        try:
            self.model.load_weights(self._receiver.tensors(announced, watch))
        finally:
            self._reader.close()

    def finish_weight_update(self) -> None:
        """Let memory go that the trainer has given up."""
        super().finish_weight_update()
        if self._mappings is not None:
            self._mappings.drop_unnamed()

    @property
    def gauges(self) -> dict[str, float]:
        """What was waited for the copies."""
        if self._receiver is None:
            return {}
        window = self._receiver.window
        return {
            "bucket_wait_ms": round(1e3 * window.waited_s, 3),
            "wire_s": round(window.total_s, 6),
        }

    def shutdown(self) -> None:
        """Let buckets and mappings go."""
        if self._reader is not None:
            self._reader.close()
        if self._mappings is not None:
            self._mappings.close()
        self._reader = self._receiver = self._mappings = None

    def _is_cancelled(self) -> bool:
        return self.cancelled()


def _at_once() -> bool:
    return True
