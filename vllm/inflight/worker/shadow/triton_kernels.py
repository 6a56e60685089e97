"""The swap of delta staging on a GPU: one launch for all elements of one width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.inflight.ops.triton_kernels import change_terms

BLOCK = 1024
"""Elements that a program exchanges."""

NUM_WARPS = 8
"""Of a program. With four, a thread needs twice as many registers, and half as many
threads wait for the memory at a time."""

COLUMNS = 7
"""int64 values of a row; swap.py fills it."""

INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every log.
@triton.jit(do_not_specialize_on_alignment=["rows", "owners", "sums"])
def _swap(
    rows, owners, sums, WIDTH: tl.constexpr, INTEGER: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 7
    offsets = tl.load(row).to(tl.pointer_type(tl.int32))
    bits = tl.load(row + 1).to(tl.pointer_type(INTEGER))
    live = tl.load(row + 2).to(tl.pointer_type(INTEGER))
    num = tl.load(row + 3)
    block = program - tl.load(row + 4)
    first = tl.load(row + 5)
    reach = tl.load(row + 6)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(offsets + at, mask=at < num, other=-1).to(tl.int64)
    # An offset beyond the parameter is left out, so the number found is too small.
    is_here = (offset >= 0) & (offset < reach)
    taken = tl.load(live + offset, mask=is_here, other=0)
    put = tl.load(bits + at, mask=is_here, other=0)
    tl.store(live + offset, put, mask=is_here)
    tl.store(bits + at, taken, mask=is_here)
    a, b = change_terms(
        (first + at) * WIDTH, taken.to(tl.int64), put.to(tl.int64), WIDTH
    )
    # Nobody reads the sums before the launch has ended.
    tl.atomic_add(sums, tl.sum(tl.where(is_here, a, 0), 0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(tl.where(is_here, b, 0), 0), sem="relaxed")
    tl.atomic_add(sums + 2, tl.sum(is_here.to(tl.int64), 0), sem="relaxed")


def swap(
    rows: torch.Tensor, owners: torch.Tensor, sums: torch.Tensor, width: int
) -> None:
    """Exchange logged elements of one width with the live ones.

    Args:
        rows: int64 [stretches, COLUMNS] on the GPU: addresses of the offsets, of the
            bits and of the parameter, number of elements, number of the first program,
            number of the first element in the log, elements of the parameter.
        owners: the row of each program; int32.
        sums: int64 [3], which are added to: both halves of what the digest of the log
            changes by, and the elements exchanged.
        width: bytes of an element.

    """
    _swap[(len(owners),)](
        *(rows, owners, sums),
        WIDTH=width,
        INTEGER=INTEGERS[width],
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
