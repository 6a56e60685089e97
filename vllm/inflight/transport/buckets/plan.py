"""The bucket plan: how tensors of given sizes are packed into buffers of one size.

The plan is a pure function of the sizes. Both ends compute it, so it is never sent. A
tensor that fits into a bucket lies in one, whole and aligned, and can be used where it
arrives. A larger tensor fills the rest of a bucket and goes on in the next. A large
tensor travels in messages of its own, so that a receiver can receive it at its
destination. Small tensors share a message.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.inflight.transport.group import ALIGNMENT, LARGE


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one tensor in one bucket."""

    tensor: int
    """The index of the tensor in the tensor list."""
    start: int
    """The offset of the run in the tensor, in bytes."""
    place: int
    """The offset of the run in the bucket, in bytes; a multiple of the alignment."""
    num_bytes: int
    is_alone: bool
    """Whether the piece is a message of its own."""


@dataclass
class Bucket:
    """The pieces that are sent in one broadcast."""

    pieces: list[Piece] = field(default_factory=list)

    @functools.cached_property
    def messages(self) -> list[list[Piece]]:
        """The pieces, grouped into messages."""
        messages: list[list[Piece]] = []
        for piece in self.pieces:
            if messages and not (piece.is_alone or messages[-1][0].is_alone):
                messages[-1].append(piece)
            else:
                messages.append([piece])
        return messages


def extent(message: list[Piece]) -> slice:
    """The bytes of a message in its bucket; gaps between pieces are never read."""
    return slice(message[0].place, message[-1].place + message[-1].num_bytes)


def plan(
    sizes: Iterable[int],
    bucket_bytes: int,
    *,
    alignment: int = ALIGNMENT,
    large: int = LARGE,
) -> Sequence[Bucket]:
    """The buckets that carry tensors of `sizes` bytes, in order.

    The result is cached, because every update asks for the same plan; do not change it.
    A tensor of size 0 is in no bucket.

    Args:
        sizes: the size of each tensor, in bytes.
        bucket_bytes: the size of a bucket; a multiple of `alignment`.
        alignment: the alignment of a piece in its bucket, in bytes.
        large: the size in bytes from which a tensor travels in messages of its own.

    """
    return _plan(tuple(sizes), bucket_bytes, alignment, large)


@functools.lru_cache(maxsize=8)
def _plan(
    sizes: tuple[int, ...], bucket_bytes: int, alignment: int, large: int
) -> tuple[Bucket, ...]:
    assert bucket_bytes > 0 and bucket_bytes % alignment == 0
    buckets: list[Bucket] = []
    free = 0
    for index, size in enumerate(sizes):
        if free < size <= bucket_bytes:
            free = 0  # the tensor fits into one bucket, so it stays whole
        start = 0
        while start < size:
            if not free:
                buckets.append(Bucket())
                free = bucket_bytes
            place = bucket_bytes - free
            taken = min(size - start, free)
            piece = Piece(index, start, place, taken, size >= large)
            buckets[-1].pieces.append(piece)
            start += taken
            free -= min(free, -(-taken // alignment) * alignment)
    return tuple(buckets)
