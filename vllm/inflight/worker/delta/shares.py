"""The proof of tensors that are cut over ranks: each rank has a share of the sum.

A rank sees the old bits of its own part alone, so it cannot tell whether the digest of
the whole tensor becomes the announced one. What it can tell is its share: what its
elements contribute. The shares of all ranks have to add up.

Thousands of tensors would be many numbers. So each rank adds the shares of all cut
tensors up, each multiplied by coefficients of its own. A fault in one tensor is missed
with a probability of about 2**-120, as the coefficients follow from a hash of its name.
The number of elements is summed as well: it is too large if two ranks serve one part.

Several ranks may hold the same part, as they do where ranks share a KV head. The sum
counts each of them, so faults of two holders could cancel in it. Each rank therefore
tells a hash of what it has found of such parts as well, which has to be the same on all
holders.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from vllm.inflight import ops

NUM = 5
"""Numbers of a share: four sums modulo 2**64, and the number of elements."""

NUM_HELD = 3
"""Numbers about parts that several ranks hold; see `held_by_several`."""

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


def held_by_several(held: Iterable[tuple[int, object, Term]]) -> list[int]:
    """What this rank has found of parts that other ranks hold as well.

    Args:
        held: for each part how many ranks hold it, what part of its tensor it is, and
            the term.

    Returns:
        `NUM_HELD` numbers for each number of holders and part: this number, a hash of
        the tensors that the rank holds this part of, and a hash of their terms. Holders
        of the same parts have found the same. Layers of one kind have the same part, so
        these are few numbers. And ranks may share one kind of layer in pairs, and
        another kind in other pairs.

    """
    hashes: dict[tuple[int, str], tuple[hashlib.blake2b, hashlib.blake2b]] = {}
    for num_holders, part, (name, (a, b), num) in held:
        key = num_holders, repr(part)
        if key not in hashes:
            hashes[key] = _hash(), _hash()
        parts, terms = hashes[key]
        parts.update(repr((name, part)).encode())
        terms.update(struct.pack("<3Q", a, b, num))
    return [
        number
        for (num_holders, _), (parts, terms) in sorted(hashes.items())
        for number in (num_holders, _number(parts), _number(terms))
    ]


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


def _number(found: hashlib.blake2b) -> int:
    return int.from_bytes(found.digest(), "little")
