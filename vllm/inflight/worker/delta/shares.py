"""The proof of tensors that are cut over ranks: each rank has a share of the sum.

A rank sees the old bits of its own part alone, so it cannot tell whether the digest of
the whole tensor becomes the announced one. What it can tell is its share: what its
elements contribute. The shares of all ranks have to add up.

Thousands of tensors would be many numbers. So each rank adds the shares of all cut
tensors up, each multiplied by coefficients of its own. A fault in one tensor is missed
with a probability of about 2**-120, as the coefficients follow from a hash of its name.
The number of elements is summed as well: it is too large if two ranks serve one part.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from vllm.inflight import ops

NUM = 5
"""Numbers of a share: four sums modulo 2**64, and the number of elements."""

Term = tuple[str, ops.Digest, int]
"""Name of a tensor, what its digest changes by, and the number of elements."""


def share(terms: Iterable[Term]) -> list[int]:
    """The share of these terms, `NUM` numbers below 2**64."""
    sums = [0] * NUM
    for name, (a, b), num in terms:
        found = hashlib.blake2b(name.encode(), digest_size=32).digest()
        for column, (coefficient, half) in enumerate(
            zip(struct.unpack("<4Q", found), (a, a, b, b), strict=True)
        ):
            sums[column] += (coefficient | 1) * half
        sums[-1] += num
    return [number % 2**64 for number in sums]
