"""Buckets: how tensors of given sizes are laid into buffers of one size.

A pure function of the sizes, so both ends compute it and nothing about it is sent.
A tensor that fits into a bucket lies in one, whole and aligned, and can be used where
it arrives; a larger one fills what is left of a bucket and goes on in the next. A large
tensor travels in messages of its own, so that whoever knows where it ends up may
receive it there; small ones share a message.
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
    """The index of the tensor among all."""
    start: int
    """Its first byte, counted in the tensor."""
    place: int
    """Its first byte, counted in the bucket; a multiple of the alignment."""
    num_bytes: int
    is_alone: bool
    """Whether it is a message of its own."""


@dataclass
class Bucket:
    """What is sent at once."""

    pieces: list[Piece] = field(default_factory=list)

    @functools.cached_property
    def messages(self) -> list[list[Piece]]:
        """Its pieces, those together that travel together."""
        messages: list[list[Piece]] = []
        for piece in self.pieces:
            if messages and not (piece.is_alone or messages[-1][0].is_alone):
                messages[-1].append(piece)
            else:
                messages.append([piece])
        return messages


def extent(message: list[Piece]) -> slice:
    """The bytes of the bucket it takes; what lies between pieces is never read."""
    return slice(message[0].place, message[-1].place + message[-1].num_bytes)


def plan(
    sizes: Iterable[int],
    bucket_bytes: int,
    *,
    alignment: int = ALIGNMENT,
    large: int = LARGE,
) -> Sequence[Bucket]:
    """The buckets that carry tensors of `sizes` bytes, in order; not to be changed.

    They are remembered: the same are asked for at every update.

    A tensor of size 0 is in none of them.

    Args:
        sizes: bytes of each tensor.
        bucket_bytes: most bytes of a bucket; a multiple of `alignment`.
        alignment: of each piece in its bucket, in bytes.
        large: bytes from which a tensor travels alone.

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
            free = 0  # it is to stay whole
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
