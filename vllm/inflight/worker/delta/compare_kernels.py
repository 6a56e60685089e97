"""Comparing whole tensors with what is served, on a GPU: two launches for a batch.

The first launch counts the elements that differ, so that the log can make room for
them. The second one logs them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.inflight.ops.triton_kernels import change_terms

BLOCK = 4096
"""Elements that a program compares."""

AT_ONCE = 256
"""Elements that a program has logged, and adds to the sums at once."""

DIMS = 4
"""Most dimensions of a copy that are longer than one; those of destinations.py."""

COLUMNS = 8 + 3 * DIMS
"""int64 values of a row: addresses of the tensor's part and of the parameter's view,
number of elements, number of the first program, offset of the view in the parameter;
addresses of the offsets and of the bits in the log, and number of the first element
there; then size and both strides of each dimension."""

INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _compared(
    row,
    block,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    IS_FLAT: tl.constexpr,
):
    """Offsets in the view, the new and the served bits, and where they differ."""
    source = tl.load(row).to(tl.pointer_type(INTEGER))
    view = tl.load(row + 1).to(tl.pointer_type(INTEGER))
    num = tl.load(row + 2).to(tl.int32)
    at = block * BLOCK + tl.arange(0, BLOCK)
    if IS_FLAT:
        # Both begin at a multiple of 16 bytes, so that a thread reads 16 at once.
        source = tl.multiple_of(source, 16)
        view = tl.multiple_of(view, 16)
        num = tl.multiple_of(num, 16)
        inside = at < num
        to = at.to(tl.int64)
        new = tl.load(source + at, mask=inside, other=0)
        served = tl.load(view + at, mask=inside, other=0)
    else:
        inside = at < num
        left = at
        start = tl.zeros((BLOCK,), tl.int64)
        to = tl.zeros((BLOCK,), tl.int64)
        for step in tl.static_range(DIMS):
            dim = row + 8 + 3 * (DIMS - 1 - step)
            size = tl.load(dim).to(tl.int32)
            index = (left % size).to(tl.int64)
            left = left // size
            start += index * tl.load(dim + 1)
            to += index * tl.load(dim + 2)
        new = tl.load(source + start, mask=inside, other=0)
        served = tl.load(view + to, mask=inside, other=0)
    return to, new, served, inside & (new != served)


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every tensor.
@triton.jit(do_not_specialize_on_alignment=["rows", "owners", "counts", "totals"])
def _count(
    rows,
    owners,
    counts,
    totals,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    IS_FLAT: tl.constexpr,
):
    program = tl.program_id(0)
    owner = tl.load(owners + program).to(tl.int64)
    row = rows + owner * (8 + 3 * DIMS)
    block = program - tl.load(row + 3).to(tl.int32)
    _, _, _, differs = _compared(row, block, INTEGER, BLOCK, DIMS, IS_FLAT)
    num = tl.sum(differs.to(tl.int32), 0)
    tl.store(counts + program, num)
    if num > 0:
        tl.atomic_add(totals + owner, num.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["rows", "owners", "ends", "sums"])
def _log(
    rows,
    owners,
    ends,
    sums,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    IS_FLAT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * (8 + 3 * DIMS)
    first_program = tl.load(row + 3).to(tl.int32)
    # `ends` has a zero before the count of the first program.
    begin = tl.load(ends + program)
    num = tl.load(ends + program + 1) - begin
    first = begin - tl.load(ends + first_program)
    start = tl.load(row + 4)
    if (num > 0) & (tl.load(row + 5) != 0):
        offsets = tl.load(row + 5).to(tl.pointer_type(tl.int32)) + first
        bits = tl.load(row + 6).to(tl.pointer_type(INTEGER)) + first
        block = program - first_program
        to, new, _, differs = _compared(row, block, INTEGER, BLOCK, DIMS, IS_FLAT)
        number = tl.cumsum(differs.to(tl.int32), 0) - 1
        tl.store(offsets + number, (to + start).to(tl.int32), mask=differs)
        tl.store(bits + number, new, mask=differs)
        # What is logged is few: the terms of the others need not be computed.
        tl.debug_barrier()
        param = (tl.load(row + 1) - start * WIDTH).to(tl.pointer_type(INTEGER))
        place = tl.load(row + 7) + first
        a = tl.zeros((AT_ONCE,), tl.int64)
        b = tl.zeros((AT_ONCE,), tl.int64)
        for done in range(0, num, AT_ONCE):
            at = done + tl.arange(0, AT_ONCE)
            inside = at < num
            offset = tl.load(offsets + at, mask=inside, other=0)
            now = tl.load(bits + at, mask=inside, other=0).to(tl.int64)
            served = tl.load(param + offset, mask=inside, other=0).to(tl.int64)
            c, d = change_terms((place + at) * WIDTH, served, now, WIDTH)
            a += tl.where(inside, c, 0)
            b += tl.where(inside, d, 0)
        tl.atomic_add(sums, tl.sum(a, 0))
        tl.atomic_add(sums + 1, tl.sum(b, 0))
        tl.atomic_add(sums + 2, num)


def count(
    rows: torch.Tensor, owners: torch.Tensor, width: int, *, is_flat: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the elements that differ.

    Args:
        rows: int64 [copies, COLUMNS] on the GPU.
        owners: the row of each program; int32.
        width: bytes of an element.
        is_flat: whether both sides of each row are contiguous, begin at a multiple of
            16 bytes, and have a multiple of 16 elements.

    Returns:
        the number of them up to the end of each program, after a zero, int64
        [programs + 1]; and their number in each row, int64 [copies].

    """
    counts = torch.zeros(len(owners) + 1, dtype=torch.int32, device=rows.device)
    totals = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    _count[(len(owners),)](
        *(rows, owners, counts[1:], totals),
        INTEGER=INTEGERS[width],
        BLOCK=BLOCK,
        DIMS=DIMS,
        IS_FLAT=is_flat,
        num_warps=8,
    )
    return counts.cumsum(0, dtype=torch.int64), totals


def log(
    rows: torch.Tensor,
    owners: torch.Tensor,
    ends: torch.Tensor,
    sums: torch.Tensor,
    width: int,
    *,
    is_flat: bool,
) -> None:
    """Log the elements that differ, with the bits that the update brings.

    Args:
        rows: as of `count`, with addresses of the log; an address of 0 for a row that
            there is no room for.
        owners: as of `count`.
        ends: the first of what `count` returned.
        sums: of the log, see change_log.py.
        width: bytes of an element.
        is_flat: as of `count`.

    """
    _log[(len(owners),)](
        *(rows, owners, ends, sums),
        WIDTH=width,
        INTEGER=INTEGERS[width],
        BLOCK=BLOCK,
        DIMS=DIMS,
        IS_FLAT=is_flat,
        AT_ONCE=AT_ONCE,
        num_warps=8,
    )
