"""Backends `inflight_nccl` and `inflight_gloo`: a trainer broadcasts to all workers.

The trainer is rank 0. A worker's rank is `rank_offset` plus its `worker_index`. The
`update_info` has the fields of upstream's dense backend: `names`, `dtype_names` and
`shapes`, in the order of the bytes. If tensors come in slices, it also has `shards`
(see tensor_slices.py). A failure ends the group; the next `init_weight_transfer_engine`
opens a new one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import EngineFault, Malformed, TransferFault
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.buckets.buffers import ONE_SET_BUCKETS
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.collective.connect import open_group
from vllm.inflight.transport.collective.environment import unpinned
from vllm.inflight.transport.collective.rendezvous import Rendezvous
from vllm.inflight.transport.group import Group, Terms
from vllm.inflight.transport.rank_numbers import rank_in_engine, worker_index
from vllm.inflight.transport.waiting import WaitLimit, check_timeout


@dataclass(kw_only=True)
class BroadcastInitInfo(upstream.WeightTransferInitInfo):
    """The trainer's address and the group that it opens there.

    Raises:
        ValueError: a field is out of range; the message names it.

    """

    wire: ClassVar[str]

    master_address: str
    master_port: int
    world_size: int
    """The number of ranks: the trainer and every worker of every engine."""
    bucket_bytes: int
    """The largest size of a bucket and of a message, in bytes; a multiple of 256. All
    ranks take the smallest one that a worker asks for."""
    rank_offset: int = 1
    """The rank of this engine's first worker; the trainer is rank 0."""
    num_buckets: int = 3
    """The number of buckets of a worker. All but one are in flight while it loads."""
    packed: bool = True
    timeout_s: float = 120.0
    """Longest wait for the other ranks, and later for each bucket, in seconds."""
    target_bucket_ms: float = 2.0
    """The longest wait for a bucket that changes nothing. After a longer wait, one more
    bucket is begun early, up to `num_buckets`."""

    def __post_init__(self) -> None:
        whole = ("master_port", "world_size", "bucket_bytes", "rank_offset")
        for name in (*whole, "num_buckets"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be a whole number")
        if not 0 < self.master_port < 1 << 16:
            raise ValueError(f"master_port must be 1 to 65535, got {self.master_port}")
        if not isinstance(self.master_address, str) or not self.master_address:
            raise ValueError("master_address must be the trainer's, as a string")
        if not self.packed:
            raise ValueError("packed=False is not offered: tensors travel in buckets")
        if self.rank_offset < 1:
            raise ValueError(
                f"rank_offset must be at least 1, for the trainer is rank 0; "
                f"got {self.rank_offset}"
            )
        check_timeout(self.timeout_s)
        for name in ("num_buckets", "target_bucket_ms"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        _ = self.terms

    @property
    def terms(self) -> Terms:
        """The terms that the trainer's group must have; raises `ValueError`."""
        return Terms(
            wire=self.wire, world_size=self.world_size, bucket_bytes=self.bucket_bytes
        )


@dataclass(kw_only=True)
class GlooInitInfo(BroadcastInitInfo):
    """The `init_info` of `inflight_gloo`."""

    wire: ClassVar[str] = "gloo"

    bucket_bytes: int = 16 << 20


@dataclass(kw_only=True)
class NcclInitInfo(BroadcastInitInfo):
    """The `init_info` of `inflight_nccl`."""

    wire: ClassVar[str] = "nccl"

    bucket_bytes: int = 256 << 20
    max_ctas: int = 8
    """Most thread blocks that a broadcast may take from decoding."""


@dataclass
class BroadcastUpdateInfo(upstream.WeightTransferUpdateInfo):
    """The tensors that the trainer is about to send.

    Raises:
        ValueError: a field cannot be read; the message names it.
        WeightsMismatch: slices do not make up their tensor.

    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    shards: list[dict[str, Any] | None] | None = None
    tensor_list: TensorList = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.tensor_list = TensorList.parse(
            self.names, self.dtype_names, self.shapes, self.shards
        )


class BroadcastEngine(StagedEngine):
    """One worker's end of the group."""

    init_info_cls: type[BroadcastInitInfo]
    update_info_cls = BroadcastUpdateInfo
    device_type: ClassVar[str]

    packed: ClassVar[bool] = True
    """Tensors travel in buckets; see releases/fields.py."""
    timeout_s = 0.0
    """Longest wait for each bucket, in seconds; from `init_info`."""

    _group: Group | None = None
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        """Leave the group joined before, and join the trainer's group.

        Raises:
            Malformed: the group does not fit this worker's device, rank or terms.
            TransferFault: a rank did not come within `timeout_s`.
            EngineFault: there is no memory for the buckets.

        """
        self.shutdown()
        if self.device.type != self.device_type:
            raise Malformed(
                f"inflight_{init_info.wire} receives on {self.device_type}, this "
                f"engine runs on {self.device.type}"
            )
        index = worker_index(self.parallel_config)
        num_buckets = init_info.num_buckets
        if self.most_bucket_bytes is not None:
            num_buckets = min(num_buckets, ONE_SET_BUCKETS)
        limit = WaitLimit(init_info.timeout_s, self._is_cancelled)
        with self._environment():
            rendezvous = Rendezvous.join(
                init_info.terms,
                init_info.master_address,
                init_info.master_port,
                init_info.rank_offset + index,
                limit,
                most_bucket_bytes=self.most_bucket_bytes,
            )
            group = open_group(
                rendezvous,
                self.device,
                limit,
                max_ctas=getattr(init_info, "max_ctas", None),
            )
            try:
                self._receiver = Receiver(
                    group,
                    num_buckets,
                    limit,
                    target_s=init_info.target_bucket_ms / 1e3,
                )
            except torch.OutOfMemoryError as error:
                raise EngineFault(
                    f"there is no memory for {num_buckets} buckets of "
                    f"{group.terms.bucket_bytes} bytes; give smaller or fewer ones"
                ) from error
        self._group, self.timeout_s = group, init_info.timeout_s

    def start_weight_update(self) -> None:
        """Begin an update, with a wait time of 0."""
        super().start_weight_update()
        if (receiver := self._receiver) is not None:
            receiver.window.total_s = 0.0

    def receive_weights(self, update_info: BroadcastUpdateInfo) -> None:
        """Load the tensors that the trainer sends.

        If the model rejects a tensor, the rest is received and dropped, so that the
        group can serve the next update.

        Raises:
            WeightsMismatch: a slice is for a rank that this engine does not have.
            TransferFault: there is no group, or it broke.
            Cancelled: the update was cancelled; the group has ended.

        """
        tensor_list = update_info.tensor_list
        num_ranks = self.parallel_config.tensor_parallel_size
        tensor_list.require_ranks(num_ranks)
        # A worker that ends shuts its transports down, whatever this thread does.
        group, receiver = self._group, self._receiver
        if group is None:
            raise TransferFault(
                "this worker is in no transfer group; call "
                "init_weight_transfer_engine first"
            )
        if receiver is None:
            raise TransferFault(
                f"the last transfer broke off ({group.ended}); call "
                "init_weight_transfer_engine again"
            )
        limit = WaitLimit(self.timeout_s, self._is_cancelled)
        rank = rank_in_engine(self.parallel_config) % num_ranks
        try:
            self.load_all(receiver.tensors(tensor_list, limit, rank))
        finally:
            if group.ended is not None:
                self._receiver = None  # and its buckets

    @property
    def gauges(self) -> dict[str, float]:
        """The window in buckets and bytes, and the waits for buckets."""
        if (receiver := self._receiver) is None:
            return {}
        window = receiver.window
        return {
            "window": window.size,
            "window_bytes": window.size * receiver.group.terms.bucket_bytes,
            "bucket_wait_ms": round(1e3 * window.waited_s, 3),
            "wire_s": round(window.total_s, 6),
        }

    def shutdown(self) -> None:
        """Leave the group and free its connections, threads and buckets."""
        group, self._group, self._receiver = self._group, None, None
        if group is not None:
            group.close()

    def _is_cancelled(self) -> bool:
        return self.cancelled()

    def _environment(self) -> AbstractContextManager[None]:
        """A context that sets the process's environment while a group is opened."""
        return nullcontext()


class GlooEngine(BroadcastEngine):
    """One worker's end, in a CPU engine."""

    init_info_cls = GlooInitInfo
    device_type = "cpu"


class NcclEngine(BroadcastEngine):
    """One worker's end, on a GPU."""

    init_info_cls = NcclInitInfo
    device_type = "cuda"

    def _environment(self) -> AbstractContextManager[None]:
        return unpinned()
