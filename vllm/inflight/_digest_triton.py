"""The digest of docs/digest.md and a count of non-finite values, in one read on a GPU.

Every program takes whole chunks of 8 bytes, adds up its terms in registers and adds
the three sums to the tensor's row. Sums wrap modulo 2**64, as the definition wants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNKS_PER_BLOCK = 1024
BLOCKS_PER_PROGRAM = 16
"""So that a tensor of 64 MiB is 512 programs: enough to fill a GPU, few atomics."""


# Nothing is specialised, because compiling takes the interpreter's lock: what was
# compiled at start-up has to serve every tensor.
@triton.jit(
    do_not_specialize=["num_chunks", "page"],
    do_not_specialize_on_alignment=["chunks", "sums"],
)
def _audit(
    chunks,
    sums,
    num_chunks,
    page,
    MASK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    a = tl.zeros((BLOCK,), tl.uint64)
    b = tl.zeros((BLOCK,), tl.uint64)
    bad = tl.zeros((BLOCK,), tl.int32)
    page = page.to(tl.uint32)
    first = tl.program_id(0).to(tl.int64) * (BLOCK * NUM_BLOCKS)
    for step in range(NUM_BLOCKS):
        chunk = first + step * BLOCK + tl.arange(0, BLOCK)
        inside = chunk < num_chunks
        word = tl.load(chunks + chunk, mask=inside, other=0)
        word = word.to(tl.uint64, bitcast=True)
        x, y = word.to(tl.uint32), (word >> 32).to(tl.uint32)
        # The key of the chunk, in 32-bit arithmetic.
        weyl = chunk.to(tl.uint32) * 0x9E3779B9 + page
        mixed = (weyl ^ (weyl >> 16)) * 0x21F0AAAD
        g = mixed ^ (mixed >> 15)
        spread = g * 0xD35A2D97
        k = spread ^ (spread >> 15) ^ page
        x64, y64, g64, k64 = (
            x.to(tl.uint64),
            y.to(tl.uint64),
            g.to(tl.uint64),
            k.to(tl.uint64),
        )
        a += x64 * g64 + y64 * k64
        b += x64 * k64 - y64 * g64
        if WIDTH == 8:
            bad += ((y & MASK) == MASK).to(tl.int32)
        elif WIDTH > 0:
            for element in tl.static_range(4 // WIDTH):
                bits = MASK << (8 * WIDTH * element)
                bad += ((x & bits) == bits).to(tl.int32)
                bad += ((y & bits) == bits).to(tl.int32)
    tl.atomic_add(sums, tl.sum(a.to(tl.int64, bitcast=True), 0))
    tl.atomic_add(sums + 1, tl.sum(b.to(tl.int64, bitcast=True), 0))
    if WIDTH > 0:
        tl.atomic_add(sums + 2, tl.sum(bad, 0).to(tl.int64))


def add_sums(
    tensor: torch.Tensor, page: int, mask: int, width: int, sums: torch.Tensor
) -> None:
    """Add `tensor`'s Σ(x·g + y·k), Σ(x·k − y·g) and non-finite values to `sums`.

    Args:
        tensor: on a GPU; padded with zeros to whole chunks if it is not made of them.
        page: the page key of all its chunks.
        mask: bits that are all ones in an infinity or NaN, of one element (of its
            upper half, if it has 8 bytes).
        width: bytes of an element; 0 counts nothing.
        sums: at least 3 int64, on the same GPU.

    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.data_ptr() % 8:
        padded = flat.new_zeros(-(-flat.numel() // 8) * 8)
        padded[: flat.numel()] = flat
        flat = padded
    num_chunks = flat.numel() // 8
    if not num_chunks:
        return
    grid = (triton.cdiv(num_chunks, CHUNKS_PER_BLOCK * BLOCKS_PER_PROGRAM),)
    _audit[grid](
        flat.view(torch.int64),
        sums,
        num_chunks,
        page,
        MASK=mask,
        WIDTH=width,
        BLOCK=CHUNKS_PER_BLOCK,
        NUM_BLOCKS=BLOCKS_PER_PROGRAM,
    )
