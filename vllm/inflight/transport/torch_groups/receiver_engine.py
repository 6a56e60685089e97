"""The transport `groups`: tensors from groups that trainers open with torch alone.

It serves the control routes of other frameworks and needs no
`--weight-transfer-config`. A worker may be in several groups at once, each with a name.
One update may use all of them, for example if each pipeline stage of a trainer has a
group. Tensors come one by one in the order of the tensor list, or all in one flat
bucket.
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
"""Most tensors in memory at once: one is loaded while the next two are received."""


@dataclass(kw_only=True)
class GroupInitInfo(upstream.WeightTransferInitInfo):
    """The group that a trainer opens.

    Raises:
        ValueError: a field is out of range; the message names it.

    """

    init_method: str
    """`tcp://host:port` of the trainer, rank 0."""
    world_size: int
    """The number of ranks: the trainer and every worker of every engine."""
    rank_offset: int = 1
    """The rank of this engine's first worker."""
    group_name: str
    backend: str
    """`gloo`, `nccl`, or `auto`, which chooses by the device."""
    timeout_s: float = 300.0
    """Longest wait for the other ranks, and later for each tensor, in seconds."""

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
    """The tensors that the trainer is about to broadcast.

    Raises:
        ValueError: a field cannot be read; the message names it.

    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    group_name: str
    flattened: bool = False
    """Whether all tensors come in one tensor of bytes, without gaps."""
    announcement: str = ""
    """The id of this call; `miss` uses it to find out whether it was received."""
    tensor_list: TensorList = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("'names' is empty")
        if not isinstance(self.group_name, str):
            raise ValueError(f"'group_name' must be a string: {self.group_name!r:.80}")
        self.tensor_list = TensorList.parse(self.names, self.dtype_names, self.shapes)


class GroupsEngine(StagedEngine):
    """One worker's ends of all groups that it has joined."""

    init_info_cls = GroupInitInfo
    update_info_cls = GroupUpdateInfo

    _joined: dict[str, Membership] | None = None

    @property
    def joined(self) -> dict[str, Membership]:
        """The joined groups by name."""
        if self._joined is None:
            self._joined = {}
        return self._joined

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Leave any group of that name, and join the group.

        Raises:
            Malformed: the group does not fit this worker's device or rank.
            TransferFault: a rank did not come within `timeout_s`.

        """
        since = time.monotonic()
        self.leave(init_info.group_name)
        backend = init_info.backend
        if backend == "auto":
            backend = "gloo" if self.device.type == "cpu" else "nccl"
        if self.device.type == "cpu" and backend == "nccl":
            raise Malformed("this engine runs on a CPU: open the group with 'gloo'")
        index = worker_index(self.parallel_config)
        limit = WaitLimit(init_info.timeout_s, self._is_cancelled)
        where = torch.device("cpu") if backend == "gloo" else self.device
        left = threading.Event()
        # A trainer with NCCL may connect at once, or only at its first broadcast. A
        # background thread waits for it, which serves both cases.
        connect_limit = limit
        if backend == "nccl":
            connect_limit = WaitLimit(init_info.timeout_s, left.is_set)
        rendezvous: Future[TorchRendezvous] = Future()
        opening = in_background(
            lambda: join_torch_group(rendezvous.result(), where, connect_limit)
        )
        # Registered before joining: a call that is rejected meanwhile is of this group.
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
                limit,
            )
            rendezvous.set_result(joined)
            if backend == "gloo":
                limit.result(opening, "gloo to connect all ranks")
        except BaseException as error:
            self.joined.pop(init_info.group_name, None)
            if not rendezvous.done():
                rendezvous.set_exception(error)
            raise

    def receive_weights(self, update_info: GroupUpdateInfo) -> None:
        """Load the tensors that a trainer broadcasts.

        If the model rejects a tensor, the rest is received and dropped, so that the
        group can serve the next update. A rejection cancels the update. A rank that has
        not received everything by then leaves the group.

        Raises:
            TransferFault: there is no such group, or it broke, now or before.
            Cancelled: the update was cancelled; the group has ended.

        """
        name = update_info.group_name
        if name not in self.joined:
            raise TransferFault(
                f"this worker is in no group {name!r}; open it with the trainer first "
                f"(groups joined: {', '.join(self.joined) or 'none'})"
            )
        self.load_all(self._tensors(self.joined[name], update_info))

    def leave(self, name: str) -> bool:
        """Leave a group; False if this worker was not in it."""
        joined = self.joined.pop(name, None)
        if joined is None:
            return False
        joined.leave()
        return True

    def miss(self, group_name: str, announcement: str, age_s: float) -> None:
        """End the group of a rejected call that was not received; see `Membership`."""
        if (joined := self.joined.get(group_name)) is not None:
            joined.miss(announcement, age_s)

    def shutdown(self) -> None:
        """Leave every group."""
        for name in list(self.joined):
            self.leave(name)

    def _tensors(self, joined: Membership, info: GroupUpdateInfo) -> Iterator[Pair]:
        limit = WaitLimit(joined.timeout_s, self._is_cancelled)
        tensor_list = info.tensor_list
        sizes = [sum(tensor_list.sizes)] if info.flattened else tensor_list.sizes
        with joined.receiving(info.announcement):
            group = limit.result(joined.opening, "the trainer to connect")
            joined.slots.grow(min(NUM_SLOTS, len(sizes)), max(sizes, default=0))
            for number, data in enumerate(_received(group, joined.slots, sizes, limit)):
                if info.flattened:
                    yield from _cut(tensor_list, data)
                else:
                    yield _typed(tensor_list, number, data)
                del data
            group.follow()

    def _is_cancelled(self) -> bool:
        return self.cancelled()


def _received(
    group: Group, slots: Buffers, sizes: list[int], limit: WaitLimit
) -> Iterator[torch.Tensor]:
    """The bytes of each broadcast, in order, while the next ones are under way."""
    in_flight: deque[tuple[torch.Tensor, Pending]] = deque()
    begun = 0
    for number in range(len(sizes)):
        while begun < min(len(sizes), number + slots.count) and (
            not in_flight or slots.is_free(begun)
        ):
            buffer = slots.take(begun)[: sizes[begun]]
            in_flight.append((buffer, group.broadcast([buffer], limit)))
            begun += 1
        buffer, pending = in_flight.popleft()
        limit.until(pending, f"tensor {number + 1} of {len(sizes)}")
        yield buffer


def _typed(tensor_list: TensorList, index: int, data: torch.Tensor) -> Pair:
    dtype = tensor_list.dtypes[index]
    if data.storage_offset() % dtype.itemsize:
        data = (
            data.clone()
        )  # not aligned, since it follows a narrower one in a flat bucket
    return tensor_list.names[index], data.view(dtype).view(tensor_list.shapes[index])


def _cut(tensor_list: TensorList, data: torch.Tensor) -> Iterator[Pair]:
    start = 0
    for index, size in enumerate(tensor_list.sizes):
        yield _typed(tensor_list, index, data[start : start + size])
        start += size
    assert start == math.prod(data.shape)
