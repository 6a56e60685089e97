"""Slots: memory that is sent or received into, over and over."""

from __future__ import annotations

import torch

from vllm.inflight.transport.group import Group
from vllm.inflight.transport.waiting import WaitLimit


class Buffers:
    """Some buffers of one size, allocated before anything is in flight.

    Whoever was handed a view may keep it, as upstream's layerwise reload does until a
    layer is complete; then the buffer is theirs and a new one takes its place.
    """

    def __init__(self, count: int, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._make(count, num_bytes)

    def grow(self, count: int, num_bytes: int) -> None:
        """Become `count` buffers of that size, unless there are as many as large.

        They become fewer, or smaller, where there are not as many, or not as large.
        """
        if num_bytes > self.num_bytes or count > self.count:
            self._make(count, num_bytes)

    def clear(self) -> None:
        """Let all buffers go but those that somebody still looks into."""
        self._make(0, 0)

    def is_free(self, index: int) -> bool:
        """Whether nobody looks into slot `index % count`, on any level of views."""
        index %= self.count
        return _num_uses(self._buffers[index]) <= self._unused[index]

    def take(self, index: int, num_bytes: int | None = None) -> torch.Tensor:
        """A buffer for slot `index % count` that is free: uint8, `num_bytes` long.

        One that has to be made anew is no longer than that, if that is less than all of
        a slot: whoever holds one of the others may be many.
        """
        wanted = self.num_bytes if num_bytes is None else num_bytes
        slot = index % self.count
        if not self.is_free(slot) or len(self._buffers[slot]) < wanted:
            self._buffers[slot] = self._new(wanted)
        return self._buffers[slot]

    def _make(self, count: int, num_bytes: int) -> None:
        # Without the buffers there were: both together may be more than there is room
        # for, and then there are none.
        self.count = self.num_bytes = 0
        self._buffers: list[torch.Tensor] = []
        self._buffers = [self._new(num_bytes) for _ in range(count)]
        self._unused = [_num_uses(buffer) for buffer in self._buffers]
        self.count, self.num_bytes = count, num_bytes

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def bucket_slots(group: Group, num_buckets: int, watch: WaitLimit) -> Buffers:
    """Slots for the buckets of one end; collective, right after the group was opened.

    One bucket is broadcast in full. That proves the group and loads whatever the
    transport loads lazily, which later would halt the whole device.

    Raises:
        ValueError: `num_buckets` is not positive.
        TransferFault: the broadcast did not work.

    """
    try:
        if num_buckets < 1:
            raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
        slots = Buffers(num_buckets, group.terms.bucket_bytes, group.device)
        watch.until(group.broadcast([slots.take(0)], watch), "the first broadcast")
    except BaseException as error:
        group.abort(f"could not send the first bucket: {error}")
        raise
    return slots


def _num_uses(buffer: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
