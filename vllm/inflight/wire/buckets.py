"""Buckets: how tensors of given sizes are laid into messages of one size.

A pure function of the sizes, so both ends compute it and nothing about it is sent.
A tensor that fits into a bucket lies in one, whole and aligned, and can be used where
it arrives; a larger one fills what is left of a bucket and goes on in the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ALIGNMENT = 256
"""Bytes; what CUDA's own allocations are aligned to, so kernels read whole lines."""


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


@dataclass(slots=True)
class Bucket:
    """One message."""

    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0
    """Up to the end of the last piece; what lies between pieces is never read."""


def plan(
    sizes: Iterable[int], bucket_bytes: int, alignment: int = ALIGNMENT
) -> list[Bucket]:
    """The buckets that carry tensors of `sizes` bytes, in order.

    A tensor of size 0 is in none of them.

    Args:
        sizes: bytes of each tensor.
        bucket_bytes: most bytes of a bucket; a multiple of `alignment`.
        alignment: of each piece in its bucket, in bytes.

    """
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
            buckets[-1].pieces.append(Piece(index, start, place, taken))
            buckets[-1].num_bytes = place + taken
            start += taken
            free -= min(free, -(-taken // alignment) * alignment)
    return buckets
