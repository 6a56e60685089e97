"""The transport `groups`: tensors from groups that trainers open with torch alone.

It serves the doors of other frameworks and needs no `--weight-transfer-config`. A
worker may be in several groups at once, each under its name, and one update may come
through all of them, as from trainers whose pipeline stages broadcast on their own.
Tensors come one by one, in the order announced, or all at once in a flat bucket.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import Malformed, TransferFault
from vllm.inflight.transport.base import StagedEngine
from vllm.inflight.transport.buckets.buffers import Buffers
from vllm.inflight.transport.buckets.tensor_list import Pair, TensorList
from vllm.inflight.transport.group import Group, Pending
from vllm.inflight.transport.rank_numbers import worker_index
from vllm.inflight.transport.torch_groups.membership import Membership
from vllm.inflight.transport.torch_groups.rendezvous import (
    TorchRendezvous,
    join_torch_group,
)
from vllm.inflight.transport.waiting import WaitLimit, check_timeout, in_background

NUM_SLOTS = 3
"""Most tensors in memory at once: one is loaded while the next two come in."""


@dataclass(kw_only=True)
class GroupInitInfo(upstream.WeightTransferInitInfo):
    """The group that a trainer opens."""

    init_method: str
    """`tcp://host:port` of the trainer, rank 0."""
    world_size: int
    """The trainer and every worker of every engine."""
    rank_offset: int = 1
    """The rank of this engine's first worker."""
    group_name: str
    backend: str
    """`gloo`, `nccl`, or `auto` for the one that fits the device."""
    timeout_s: float = 300.0
    """Longest wait for the other ranks, and later for any one tensor."""

    def __post_init__(self) -> None:
        for name in ("world_size", "rank_offset"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name} must be a whole number")
        for name in ("init_method", "group_name", "backend"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string")
        check_timeout(self.timeout_s)


@dataclass
class GroupUpdateInfo(upstream.WeightTransferUpdateInfo):
    """What is about to be broadcast."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group_name: str
    flattened: bool = False
    """All in one tensor of bytes, one behind the other, without gaps."""
    announcement: str = ""
    """An id of this call, by which `miss` knows whether it was received."""
    announced: TensorList = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("'names' is empty")
        if not isinstance(self.group_name, str):
            raise ValueError(f"'group_name' must be a string: {self.group_name!r:.80}")
        self.announced = TensorList.parse(self.names, self.dtype_names, self.shapes)


class GroupsEngine(StagedEngine):
    """One worker's ends of all groups it is in."""

    init_info_cls = GroupInitInfo
    update_info_cls = GroupUpdateInfo

    _joined: dict[str, Membership] | None = None

    @property
    def joined(self) -> dict[str, Membership]:
        """The groups by their names."""
        if self._joined is None:
            self._joined = {}
        return self._joined

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Join a group; one of that name is left first.

        Raises:
            Malformed: this worker has no place in such a group.
            TransferFault: not everybody came within `timeout_s`.

        """
        since = time.monotonic()
        self.leave(init_info.group_name)
        backend = init_info.backend
        if backend == "auto":
            backend = "gloo" if self.device.type == "cpu" else "nccl"
        if self.device.type == "cpu" and backend == "nccl":
            raise Malformed("this engine runs on a CPU: open the group with 'gloo'")
        index = worker_index(self.parallel_config)
        watch = WaitLimit(init_info.timeout_s, self._is_cancelled)
        where = torch.device("cpu") if backend == "gloo" else self.device
        left = threading.Event()
        # A trainer with NCCL connects at once, or not before its first broadcast; both
        # are met when somebody waits for it beside all else.
        patience = watch
        if backend == "nccl":
            patience = WaitLimit(init_info.timeout_s, left.is_set)
        meeting: Future[TorchRendezvous] = Future()
        opening = in_background(
            lambda: join_torch_group(meeting.result(), where, patience)
        )
        # From now on: what is announced meanwhile, and refused, is of this group.
        self.joined[init_info.group_name] = Membership(
            init_info.group_name,
            since,
            opening,
            left,
            init_info.timeout_s,
            Buffers(0, 0, where),
        )
        try:
            joined = TorchRendezvous.join(
                backend,
                init_info.init_method,
                init_info.rank_offset + index,
                init_info.world_size,
                init_info.group_name,
                watch,
            )
            meeting.set_result(joined)
            if backend == "gloo":
                watch.result(opening, "gloo to connect all ranks")
        except BaseException as error:
            self.joined.pop(init_info.group_name, None)
            if not meeting.done():
                meeting.set_exception(error)
            raise

    def receive_weights(self, update_info: GroupUpdateInfo) -> None:
        """Load what a trainer broadcasts.

        If the model refuses a tensor, the rest is received and dropped, so that the
        group is good for the next update. That cancels the update, so a rank which has
        not received all of it by then leaves the group.

        Raises:
            TransferFault: there is no such group, or it broke, now or before.
            Cancelled: the update is not wanted any more; the group is gone.

        """
        name = update_info.group_name
        if name not in self.joined:
            raise TransferFault(
                f"this worker is in no group {name!r}; open it with the trainer first "
                f"(groups joined: {', '.join(self.joined) or 'none'})"
            )
        self.load_all(self._tensors(self.joined[name], update_info))

    def leave(self, name: str) -> bool:
        """Leave a group; whether this worker was in it."""
        joined = self.joined.pop(name, None)
        if joined is None:
            return False
        joined.leave()
        return True

    def miss(self, group_name: str, announcement: str, age_s: float) -> None:
        """An announcement was refused: unless it was received, its group has ended."""
        if (joined := self.joined.get(group_name)) is not None:
            joined.miss(announcement, age_s)

    def shutdown(self) -> None:
        """Leave every group."""
        for name in list(self.joined):
            self.leave(name)

    def _tensors(self, joined: Membership, info: GroupUpdateInfo) -> Iterator[Pair]:
        watch = WaitLimit(joined.timeout_s, self._is_cancelled)
        announced = info.announced
        sizes = [sum(announced.sizes)] if info.flattened else announced.sizes
        with joined.receiving(info.announcement):
            group = watch.result(joined.opening, "the trainer to connect")
            joined.slots.grow(min(NUM_SLOTS, len(sizes)), max(sizes, default=0))
            for number, data in enumerate(_received(group, joined.slots, sizes, watch)):
                if info.flattened:
                    yield from _cut(announced, data)
                else:
                    yield _typed(announced, number, data)
                del data
            group.follow()

    def _is_cancelled(self) -> bool:
        return self.cancelled()


def _received(
    group: Group, slots: Buffers, sizes: list[int], watch: WaitLimit
) -> Iterator[torch.Tensor]:
    """The bytes of each broadcast, in order, the next ones under way."""
    in_flight: deque[tuple[torch.Tensor, Pending]] = deque()
    begun = 0
    for number in range(len(sizes)):
        while begun < min(len(sizes), number + slots.count) and (
            not in_flight or slots.is_free(begun)
        ):
            buffer = slots.take(begun)[: sizes[begun]]
            in_flight.append((buffer, group.broadcast([buffer], watch)))
            begun += 1
        buffer, pending = in_flight.popleft()
        watch.until(pending, f"tensor {number + 1} of {len(sizes)}")
        yield buffer


def _typed(announced: TensorList, index: int, data: torch.Tensor) -> Pair:
    dtype = announced.dtypes[index]
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()  # behind a narrower one in a flat bucket
    return announced.names[index], data.view(dtype).view(announced.shapes[index])


def _cut(announced: TensorList, data: torch.Tensor) -> Iterator[Pair]:
    start = 0
    for index, size in enumerate(announced.sizes):
        yield _typed(announced, index, data[start : start + size])
        start += size
    assert start == math.prod(data.shape)
