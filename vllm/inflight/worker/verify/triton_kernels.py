"""The drift on a GPU: one launch for all samples of one dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Elements that a program reads at once; no sample has more."""

COLUMNS = 4
"""int64 values of a row of `squares`."""

NUMBERS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
"""The dtypes of samples that are compared here."""


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every sample.
@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["rows", "found"])
def _squares(rows, found, num, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    row = rows + tl.program_id(0).to(tl.int64) * 4
    old = tl.load(row).to(tl.pointer_type(NUMBER))
    new = tl.load(row + 1).to(tl.pointer_type(NUMBER))
    size = tl.load(row + 2)
    to = found + tl.load(row + 3)
    at = tl.arange(0, BLOCK)
    before = tl.load(old + at, mask=at < size, other=0).to(tl.float32)
    after = tl.load(new + at, mask=at < size, other=0).to(tl.float32)
    moved = after - before
    tl.store(to, tl.sum(moved * moved, 0))
    tl.store(to + num, tl.sum(before * before, 0))


def squares(rows: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> None:
    """Add the squares of samples up.

    Args:
        rows: int64 [samples, COLUMNS] on the GPU, or flat: addresses of the sample
            before and of the one after, elements, and the number of the sample.
        found: float32 [2, numbers]: gets for each number the sum of the squares of what
            has moved, and that of the sample before.
        dtype: of the samples.

    """
    _squares[(rows.numel() // COLUMNS,)](
        *(rows, found, found.shape[1]), NUMBER=NUMBERS[dtype], BLOCK=BLOCK, num_warps=8
    )
