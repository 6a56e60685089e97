"""The digest of docs/digest.md and a count of non-finite values, in one read on a GPU.

One launch reads many tensors. A table assigns a block of a tensor to each program. A
program sums its terms in registers, and adds its three sums to the row of the tensor.
Sums wrap modulo 2**64, as in the definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import triton
import triton.language as tl

from vllm.inflight.ops.launch_tables import LaunchTable

CHUNKS_PER_STEP = 1024
STEPS = 16
CHUNKS_PER_PROGRAM = CHUNKS_PER_STEP * STEPS
"""128 KiB: a tensor of 64 MiB is 512 programs, enough to fill a GPU, few atomics."""

ROW = 4
"""int64 values of a tensor's sums: a, b, non-finite values, and one unused."""


@contextmanager
def compiling_at_start() -> Iterator[None]:
    """Context: what Triton compiles here delays no step, since nothing is decoded yet.

    vLLM has warmed up before. From then on it warns of each kernel that is compiled,
    and with `--jit-monitor-mode error` it fails.
    """
    runtime = triton.knobs.runtime
    with runtime.scope():
        runtime.jit_post_compile_hook = None
        yield


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every tensor.
@triton.jit(
    do_not_specialize=["first_row", "page"],
    do_not_specialize_on_alignment=["rows", "owners", "sums"],
)
def _audit(
    rows,
    owners,
    sums,
    first_row,
    page,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STEPS: tl.constexpr,
):
    program = tl.program_id(0)
    entry = rows + tl.load(owners + program).to(tl.int64) * 6
    data = tl.load(entry).to(tl.pointer_type(tl.int64))
    num_chunks = tl.load(entry + 1)
    first = tl.load(entry + 2) + (program - tl.load(entry + 5)) * (BLOCK * NUM_STEPS)
    row = sums + (tl.load(entry + 3) + first_row) * 4
    limit = tl.load(entry + 4).to(tl.uint64, bitcast=True)
    page = page.to(tl.uint32)
    a = tl.zeros((BLOCK,), tl.uint64)
    b = tl.zeros((BLOCK,), tl.uint64)
    bad = tl.zeros((BLOCK,), tl.int32)
    for step in range(NUM_STEPS):
        chunk = first + step * BLOCK + tl.arange(0, BLOCK)
        inside = chunk < num_chunks
        word = tl.load(data + chunk, mask=inside, other=0)
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
            bad += (((word << 1) >> 1) >= limit).to(tl.int32)
        elif WIDTH > 0:
            # The magnitude of each element, below its sign.
            for element in tl.static_range(4 // WIDTH):
                magnitude = (1 << (8 * WIDTH - 1)) - 1
                at = 8 * WIDTH * element
                bad += (((x >> at) & magnitude) >= limit.to(tl.uint32)).to(tl.int32)
                bad += (((y >> at) & magnitude) >= limit.to(tl.uint32)).to(tl.int32)
    tl.atomic_add(row, tl.sum(a.to(tl.int64, bitcast=True), 0))
    tl.atomic_add(row + 1, tl.sum(b.to(tl.int64, bitcast=True), 0))
    if WIDTH > 0:
        tl.atomic_add(row + 2, tl.sum(bad, 0).to(tl.int64))


def make_table(
    places: Sequence[tuple[int, int, int]],
    device: torch.device,
    *,
    firsts: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> LaunchTable | None:
    """The table of `add_sums`: int64 [parts, 6]; None if there is nothing to read.

    Args:
        places: (address, number of whole chunks, smallest magnitude that counts as not
            finite) of each tensor or part. The address is a multiple of 8.
        device: the GPU of the tensors.
        firsts: number of each part's first chunk in its whole tensor; default 0.
        rows: row of each tensor's sums; by default one row each, in order.

    """
    addresses, num_chunks, limits = np.array(places, dtype=np.int64).reshape(-1, 3).T
    # A chunk's key depends on its number in the whole tensor. The address in the table
    # is chunk 0's, which is read only if it is in the part.
    at = np.zeros_like(addresses) if firsts is None else np.asarray(firsts, np.int64)
    row = np.arange(len(at)) if rows is None else np.asarray(rows, np.int64)
    num_programs = -(-num_chunks // CHUNKS_PER_PROGRAM)
    if not num_programs.any():
        return None
    columns = addresses - 8 * at, at + num_chunks, at, row, limits, num_programs
    made = LaunchTable.of(np.stack(columns, 1), 5, num_programs, device)
    if made.rows.is_cuda:  # it is kept, and read on other streams, too
        torch.cuda.current_stream(device).synchronize()
    return made


def add_sums(
    table: LaunchTable,
    sums: torch.Tensor,
    first_row: int,
    page: int,
    width: int,
) -> None:
    """Add every tensor's Σ(x·g + y·k), Σ(x·k − y·g) and non-finite values to its row.

    Args:
        table: of `make_table`.
        sums: int64 [rows, ROW], on the same GPU.
        first_row: the row of the first tensor of the table.
        page: the page key of all chunks.
        width: bytes of an element; 0 counts nothing.

    """
    _audit[(len(table.owners),)](
        *table,
        sums,
        first_row,
        page,
        WIDTH=width,
        BLOCK=CHUNKS_PER_STEP,
        NUM_STEPS=STEPS,
    )


CHANGES_PER_PROGRAM = 1024


@triton.jit
def change_terms(offset, before, now, WIDTH: tl.constexpr):
    """What each changed element adds to both sums, given its place in bytes."""
    # Each change has its own page, as its place may be anywhere.
    page = (offset >> 35).to(tl.uint32) + 1
    page = (page ^ (page >> 16)) * 0x21F0AAAD
    page = (page ^ (page >> 15)) * 0xD35A2D97
    page = page ^ (page >> 15)
    weyl = (offset >> 3).to(tl.uint32) * 0x9E3779B9 + page
    mixed = (weyl ^ (weyl >> 16)) * 0x21F0AAAD
    g = mixed ^ (mixed >> 15)
    spread = g * 0xD35A2D97
    k = (spread ^ (spread >> 15) ^ page).to(tl.int64)
    g = g.to(tl.int64)
    if WIDTH == 8:
        x = (now & 0xFFFFFFFF) - (before & 0xFFFFFFFF)
        y = ((now >> 32) & 0xFFFFFFFF) - ((before >> 32) & 0xFFFFFFFF)
    else:
        mask = (1 << (8 * WIDTH)) - 1
        value = ((now & mask) - (before & mask)) << (8 * (offset & 3))
        x = tl.where((offset & 4) == 0, value, 0)
        y = tl.where((offset & 4) == 0, 0, value)
    return x * g + y * k, x * k - y * g


@triton.jit(
    do_not_specialize=["num"],
    do_not_specialize_on_alignment=["places", "old_bits", "new_bits", "sums"],
)
def _changes(
    places, old_bits, new_bits, sums, num, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    offset = tl.load(places + at, mask=inside, other=0) * WIDTH
    before = tl.load(old_bits + at, mask=inside, other=0).to(tl.int64)
    now = tl.load(new_bits + at, mask=inside, other=0).to(tl.int64)
    a, b = change_terms(offset, before, now, WIDTH)
    tl.atomic_add(sums, tl.sum(a, 0))
    tl.atomic_add(sums + 1, tl.sum(b, 0))


def add_changes(
    places: torch.Tensor,
    old_bits: torch.Tensor,
    new_bits: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Add what changed elements contribute to both sums of a digest.

    Args:
        places: numbers of the elements; int64, on the GPU.
        old_bits: the elements before, as integers.
        new_bits: the elements now, likewise.
        sums: int64; the first two are added to.

    """
    if num := places.numel():
        _changes[(triton.cdiv(num, CHANGES_PER_PROGRAM),)](
            *(places, old_bits, new_bits, sums, num),
            WIDTH=old_bits.element_size(),
            BLOCK=CHANGES_PER_PROGRAM,
        )


def sums_of_changes(
    places: torch.Tensor, old_bits: torch.Tensor, new_bits: torch.Tensor
) -> tuple[int, int]:
    """What changed elements add to both sums of the digest; see ops/digests.py."""
    sums = torch.zeros(2, dtype=torch.int64, device=places.device)
    add_changes(places, old_bits, new_bits, sums)
    a, b = sums.tolist()
    return a % 2**64, b % 2**64
