"""The digest of docs/digest.md in plain torch arithmetic, for any device.

The code is slow and follows the definition literally; tests compare the native kernels
with it. Every 64-bit sum is an int64 that wraps, which is the definition's mod 2**64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

WEYL = 0x9E3779B9
MUL1 = 0x21F0AAAD
MUL2 = 0xD35A2D97
COUNT = 0x9E3779B97F4A7C15
PLACE = 0xD1B54A32D192ED03
LOW32 = 0xFFFFFFFF

LEAF_ELEMENTS = 1 << 20
"""Most elements expanded to int64 at a time: 8 MiB for each intermediate."""

UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Word = TypeVar("Word", int, torch.Tensor)


def row_major(shape: Sequence[int]) -> list[int]:
    """Element strides of a dense tensor of shape `shape`."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def page_key(page: Word) -> Word:
    """The key of a page, which is 2^32 chunks."""
    x = (page + 1) & LOW32
    x = ((x ^ (x >> 16)) * MUL1) & LOW32
    x = ((x ^ (x >> 15)) * MUL2) & LOW32
    return x ^ (x >> 15)


def chunk_key(
    chunk: torch.Tensor, page: int | torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The keys (g, k) of chunk numbers, given their page keys."""
    weyl = ((chunk & LOW32) * WEYL + page) & LOW32
    mixed = ((weyl ^ (weyl >> 16)) * MUL1) & LOW32
    g = mixed ^ (mixed >> 15)
    spread = (g * MUL2) & LOW32
    return g, spread ^ (spread >> 15) ^ page


def reference_sums(
    tensor: torch.Tensor, strides: Sequence[int], start: int
) -> tuple[int, int]:
    """Both sums of a part whose first element is element `start` of the tensor."""
    width = tensor.element_size()
    a = b = 0
    for leaf, first in leaves(tensor, strides, start):
        leaf_a, leaf_b = _leaf_sums(leaf, [s * width for s in strides], first * width)
        a, b = a + leaf_a, b + leaf_b
    return a % 2**64, b % 2**64


def reference_changes(
    places: torch.Tensor, old_bits: torch.Tensor, new_bits: torch.Tensor, width: int
) -> tuple[int, int]:
    """What changed elements add to both sums; the bits are integers of their width."""
    offsets = places * width
    before, now = (bits.to(torch.int64) for bits in (old_bits, new_bits))
    if width == 8:
        real = (now & LOW32) - (before & LOW32)
        imaginary = ((now >> 32) & LOW32) - ((before >> 32) & LOW32)
    else:
        mask = (1 << 8 * width) - 1
        values = ((now & mask) - (before & mask)) << 8 * (offsets & 3)
        in_high_word = offsets & 4 != 0
        real = values.masked_fill(in_high_word, 0)
        imaginary = values.masked_fill(~in_high_word, 0)
    g, k = chunk_key(offsets >> 3, page_key(offsets >> 35))
    a = int((real * g + imaginary * k).sum())
    b = int((real * k - imaginary * g).sum())
    return a % 2**64, b % 2**64


def leaves(
    tensor: torch.Tensor, strides: Sequence[int], start: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut a tensor into small pieces: (piece, its first element) of each."""
    if tensor.numel() == 0:
        return
    if tensor.numel() <= LEAF_ELEMENTS:
        yield tensor, start
        return
    dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    half = tensor.shape[dim] // 2
    half -= half % 8 if half > 8 else 0  # keeps most pieces aligned
    yield from leaves(tensor.narrow(dim, 0, half), strides, start)
    rest = tensor.narrow(dim, half, tensor.shape[dim] - half)
    yield from leaves(rest, strides, start + half * strides[dim])


def _leaf_sums(leaf: torch.Tensor, strides: list[int], start: int) -> tuple[int, int]:
    """Both sums of one piece; strides and start are in bytes."""
    # Trailing dimensions that are dense in the whole tensor are one run of bytes.
    run, outer = leaf.element_size(), leaf.dim()
    while outer and (leaf.shape[outer - 1] == 1 or strides[outer - 1] == run):
        outer -= 1
        run *= leaf.shape[outer]
    shape, strides = leaf.shape[:outer], strides[:outer]
    # The definition is in bytes, so up to 8 bytes are read at a time.
    unit = next(u for u in UNITS if all(n % u == 0 for n in (run, start, *strides)))
    # A copy, because a view as wider integers must be aligned.
    data = leaf.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    values = data.view(torch.uint8).view(UNITS[unit]).to(torch.int64)
    offsets = torch.full((), start, dtype=torch.int64, device=leaf.device)
    for size, stride in zip((*shape, run // unit), (*strides, unit), strict=True):
        steps = torch.arange(size, device=leaf.device) * stride
        offsets = offsets.unsqueeze(-1) + steps
    offsets = offsets.reshape(-1)
    if unit == 8:
        real, imaginary = values & LOW32, (values >> 32) & LOW32
    else:
        values = (values & ((1 << 8 * unit) - 1)) << 8 * (offsets & 3)
        in_high_word = offsets & 4 != 0
        real = values.masked_fill(in_high_word, 0)
        imaginary = values.masked_fill(~in_high_word, 0)
    end = start + run + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    pages = (start >> 35, (end - 1) >> 35)
    # A page is 32 GiB, so a piece is nearly always in one page, with one key.
    one_page = pages[0] == pages[1]
    page = page_key(pages[0]) if one_page else page_key(offsets >> 35)
    g, k = chunk_key(offsets >> 3, page)
    a = int((real * g + imaginary * k).sum())
    b = int((real * k - imaginary * g).sum())
    # Byte o adds PLACE * (2 * o + 1); here all bytes of all units at once.
    num = offsets.numel()
    places = 2 * unit * int(offsets.sum()) + num * unit * unit
    return a + COUNT * num * unit, b + PLACE * places
