"""Reusable buffers, which are sent from or received into."""

from __future__ import annotations

import torch

from vllm.inflight.transport.group import Group
from vllm.inflight.transport.waiting import WaitLimit

ONE_SET_BUCKETS = 2
"""Most buckets of a worker with one set of weights. Fewer would not overlap."""
MIB = 1 << 20
SHARE = 0.00375
"""Of one set of weights, the part that such a bucket may take: both take 0.75 %."""
LEAST_BYTES, MOST_BYTES = 48 * MIB, 256 * MIB
"""It may take the first in any case; a part of a delta has two thirds of that. And it
never takes more than the second, which is enough."""


def one_set_bucket_bytes(num_bytes: int) -> int:
    """Most bytes of a bucket beside one set of weights.

    Args:
        num_bytes: of the weights on this rank.

    """
    return min(max(int(num_bytes * SHARE) // MIB * MIB, LEAST_BYTES), MOST_BYTES)


class Buffers:
    """Buffers of one size, allocated before any transfer is in flight.

    A caller may keep a view of a buffer, as upstream's layerwise reload does until a
    layer is complete. The buffer then belongs to the caller, and a new one replaces it.
    """

    def __init__(self, count: int, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._make(count, num_bytes)

    def grow(self, count: int, num_bytes: int) -> None:
        """Make `count` buffers of that size, unless these are enough and large enough.

        If either number is too small, both are replaced, even by a smaller one.
        """
        if num_bytes > self.num_bytes or count > self.count:
            self._make(count, num_bytes)

    def clear(self) -> None:
        """Free all buffers; a buffer with a view lives as long as the view."""
        self._make(0, 0)

    def is_free(self, index: int) -> bool:
        """Whether no view of the buffer of slot `index % count` is left."""
        index %= self.count
        return _num_uses(self._buffers[index]) <= self._unused[index]

    def take(self, index: int, num_bytes: int | None = None) -> torch.Tensor:
        """A free buffer for slot `index % count`: uint8, at least `num_bytes` long.

        If the slot's buffer is in use, a new one of just `num_bytes` is allocated. That
        saves memory, because callers may hold many buffers.

        Args:
            index: counts the uses of all slots.
            num_bytes: the bytes needed; by default the size of a slot.

        """
        wanted = self.num_bytes if num_bytes is None else num_bytes
        slot = index % self.count
        if not self.is_free(slot) or len(self._buffers[slot]) < wanted:
            self._buffers[slot] = self._new(wanted)
        return self._buffers[slot]

    def _make(self, count: int, num_bytes: int) -> None:
        # The old buffers are freed first, because memory may not hold both. If the
        # allocation fails, there are no buffers.
        self.count = self.num_bytes = 0
        self._buffers: list[torch.Tensor] = []
        self._buffers = [self._new(num_bytes) for _ in range(count)]
        self._unused = [_num_uses(buffer) for buffer in self._buffers]
        self.count, self.num_bytes = count, num_bytes

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def bucket_buffers(group: Group, num_buckets: int, limit: WaitLimit) -> Buffers:
    """Buffers for the buckets of one rank; collective, after the group was opened.

    One full bucket is broadcast. That tests the group. It also loads what the library
    loads at first use, which would halt the whole device during an update.

    Raises:
        ValueError: `num_buckets` is not positive.
        TransferFault: the broadcast failed.

    """
    try:
        if num_buckets < 1:
            raise ValueError(f"num_buckets must be at least 1, got {num_buckets}")
        slots = Buffers(num_buckets, group.terms.bucket_bytes, group.device)
        limit.until(group.broadcast([slots.take(0)], limit), "the first broadcast")
    except BaseException as error:
        group.abort(f"could not send the first bucket: {error}")
        raise
    return slots


def _num_uses(buffer: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
