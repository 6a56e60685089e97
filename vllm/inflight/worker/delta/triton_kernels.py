"""Writing a delta on a GPU: one launch for all changes of a part.

The changes go into the shadow parameters, or into the log of delta staging. Another
launch writes them into the samples of the version.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm.inflight.ops.triton_kernels import change_terms
from vllm.inflight.worker.delta.destinations import MOST_DIMS
from vllm.inflight.worker.verify.drift import NUM_RUNS, RUN

BLOCK = 1024
"""Changes that a program writes."""

COLUMNS = 16 + 3 * MOST_DIMS
"""int64 values of a row of `write`; device_writer.py fills it."""

NUM_WARPS = 8
"""Of a program of `write`. With four, a thread needs so many registers that a
multiprocessor has too few programs to wait for the memory with."""

COPY_COLUMNS = 5
"""int64 values of a row of `copy`."""

SAMPLE_COLUMNS = 7
"""int64 values of a row of `sample`."""

SEARCH_STEPS = 32
"""Halvings after which one of less than 2**32 changes is found."""

SUMS = 4
"""int64 values of the sums of a tensor: both halves of what its digest changes by, the
elements that become NaN or Inf, and the elements written."""

INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every tensor.
@triton.jit(do_not_specialize_on_alignment=["rows", "owners", "sums", "log_sums"])
def _write(
    rows,
    owners,
    sums,
    log_sums,
    WIDTH: tl.constexpr,
    PLACE: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    IS_LOGGED: tl.constexpr,
):
    # Places and bits may lie where the offsets and the new bits are stored: each lane
    # reads its own before it stores there.
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * COLUMNS
    places = tl.load(row).to(tl.pointer_type(PLACE))
    bits = tl.load(row + 1).to(tl.pointer_type(INTEGER))
    live = tl.load(row + 2).to(tl.pointer_type(INTEGER))
    target = tl.load(row + 3).to(tl.pointer_type(INTEGER))
    log = tl.load(row + 4).to(tl.pointer_type(tl.int32))
    num = tl.load(row + 5)
    block = program - tl.load(row + 6)
    sum_of = sums + tl.load(row + 7) * 4
    # One for each lane, because masks are combined with them.
    is_added = tl.load(row + 8) + tl.zeros((BLOCK,), tl.int64)
    limit = tl.load(row + 9) + tl.zeros((BLOCK,), tl.int64)
    nan_byte = tl.load(row + 10) + tl.zeros((BLOCK,), tl.int64)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    place = tl.load(places + at, mask=inside, other=0).to(tl.int64)
    # Followed from the part of the tensor into the view of the parameter.
    left = place - tl.load(row + 11)
    offset = tl.zeros((BLOCK,), tl.int64) + tl.load(row + 12)
    is_here = inside & (left >= 0)
    if INDEX_BITS == 0:
        # Both are in one piece, so nothing has to be divided.
        offset += left
        is_here &= left < tl.load(row + 16)
    else:
        if INDEX_BITS == 32:
            # Of malformed data, a place may be any number.
            is_here &= left < 0x80000000
            rest = left.to(tl.uint32)
        else:
            rest = left
        within = tl.zeros_like(rest)
        for dim in range(tl.load(row + 14).to(tl.int32)):
            size = tl.load(row + 16 + 3 * dim).to(rest.dtype)
            step = tl.load(row + 17 + 3 * dim).to(rest.dtype)
            index = rest // step
            rest -= index * step
            within += index * tl.load(row + 18 + 3 * dim).to(rest.dtype)
            is_here &= index < size
        is_here &= rest == 0
        offset += within.to(tl.int64)
    change = tl.load(bits + at, mask=is_here, other=0)
    before = tl.load(live + offset, mask=is_here, other=0)
    now = tl.where(is_added != 0, before + change, change).to(INTEGER)
    if IS_LOGGED:
        tl.store(target + at, now, mask=is_here)
    else:
        tl.store(target + offset, now, mask=is_here)
    tl.store(log + at, tl.where(is_here, offset, -1).to(tl.int32), mask=inside)
    before64, now64 = before.to(tl.int64), now.to(tl.int64)
    # Nobody reads the sums before the launch has ended. In the usual order each of them
    # would wait until all that the program has written is seen.
    if IS_LOGGED:
        first = tl.load(row + 13)
        c, d = change_terms((first + at) * WIDTH, before64, now64, WIDTH)
        tl.atomic_add(log_sums, tl.sum(tl.where(is_here, c, 0), 0), sem="relaxed")
        tl.atomic_add(log_sums + 1, tl.sum(tl.where(is_here, d, 0), 0), sem="relaxed")
        tl.atomic_add(log_sums + 2, tl.sum(is_here.to(tl.int64), 0), sem="relaxed")
    a, b = change_terms(place * WIDTH, before64, now64, WIDTH)
    tl.atomic_add(sum_of, tl.sum(tl.where(is_here, a, 0), 0), sem="relaxed")
    tl.atomic_add(sum_of + 1, tl.sum(tl.where(is_here, b, 0), 0), sem="relaxed")
    # Without its sign, a number is no less than the smallest one that is not finite.
    magnitude = now64 & ((1 << (8 * WIDTH - 1)) - 1)
    bad = is_here & (limit != 0) & (magnitude >= limit)
    bad |= is_here & (nan_byte >= 0) & ((now64 & 0xFF) == nan_byte)
    tl.atomic_add(sum_of + 2, tl.sum(bad.to(tl.int64), 0), sem="relaxed")
    tl.atomic_add(sum_of + 3, tl.sum(is_here.to(tl.int64), 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["rows", "owners"])
def _copy(rows, owners, INTEGER: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 5
    log = tl.load(row).to(tl.pointer_type(tl.int32))
    live = tl.load(row + 1).to(tl.pointer_type(INTEGER))
    shadow = tl.load(row + 2).to(tl.pointer_type(INTEGER))
    num = tl.load(row + 3)
    block = program - tl.load(row + 4)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(log + at, mask=at < num, other=-1).to(tl.int64)
    is_here = offset >= 0
    value = tl.load(live + offset, mask=is_here, other=0)
    tl.store(shadow + offset, value, mask=is_here)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _sample(
    rows,
    PLACE: tl.constexpr,
    INTEGER: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = rows + tl.program_id(0).to(tl.int64) * COLUMNS
    places = tl.load(row).to(tl.pointer_type(PLACE))
    bits = tl.load(row + 1).to(tl.pointer_type(INTEGER))
    num = tl.load(row + 2)
    is_added = tl.load(row + 3)
    sample = tl.load(row + 4).to(tl.pointer_type(INTEGER))
    size = tl.load(row + 5)
    run = tl.arange(0, RUNS).to(tl.int64)
    first = run * tl.load(row + 6)
    # The first change that is not before each run: places increase.
    low = tl.zeros((RUNS,), tl.int64)
    high = low + num
    for _ in range(STEPS):
        is_open = low < high
        middle = (low + high) >> 1
        place = tl.load(places + middle, mask=is_open, other=0).to(tl.int64)
        is_before = is_open & (place < first)
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_open & (place >= first), middle, high)
    at = low[:, None] + tl.arange(0, RUN)[None, :]
    inside = at < num
    place = tl.load(places + at, mask=inside, other=-1).to(tl.int64)
    to = place - first[:, None]
    target = run[:, None] * RUN + to
    inside &= (to >= 0) & (to < RUN) & (target < size)
    change = tl.load(bits + at, mask=inside, other=0)
    before = tl.load(sample + target, mask=inside, other=0)
    now = tl.where(is_added + tl.zeros_like(at) != 0, before + change, change)
    tl.store(sample + target, now.to(INTEGER), mask=inside)


def write(
    rows: torch.Tensor,
    owners: torch.Tensor,
    sums: torch.Tensor,
    width: int,
    log_sums: torch.Tensor | None = None,
    *,
    place_bytes: int,
    index_bits: int,
) -> None:
    """Write changes of one element width into the shadow weights, or into a log.

    Args:
        rows: int64 [groups, COLUMNS] on the GPU, or flat.
        owners: the row of each program; int32.
        sums: int64 [tensors, SUMS]; it is added to.
        width: bytes of an element.
        log_sums: of the log of delta staging, see change_log.py; None without it.
        place_bytes: of a place, 4 or 8.
        index_bits: 0 if parts and views of all rows are in one piece; 32 if all parts
            and views reach less far than 2**31 elements; else 64. Places are divided
            in so many bits, as 64 take longer.

    """
    _write[(len(owners),)](
        *(rows, owners, sums, sums if log_sums is None else log_sums),
        WIDTH=width,
        PLACE=INTEGERS[place_bytes],
        INTEGER=INTEGERS[width],
        BLOCK=BLOCK,
        COLUMNS=COLUMNS,
        INDEX_BITS=index_bits,
        IS_LOGGED=log_sums is not None,
        num_warps=NUM_WARPS,
    )


def copy(rows: torch.Tensor, owners: torch.Tensor, width: int) -> None:
    """Copy logged elements of one width from the live to the shadow weights.

    Args:
        rows: int64 [groups, COPY_COLUMNS] on the GPU: addresses of the log, of the live
            and of the shadow parameter, number of elements, and number of the first
            program.
        owners: the row of each program; int32.
        width: bytes of an element.

    """
    _copy[(len(owners),)](rows, owners, INTEGER=INTEGERS[width], BLOCK=BLOCK)


def sample(rows: torch.Tensor, width: int, *, place_bytes: int) -> None:
    """Write changes of one element width into samples.

    Args:
        rows: int64 [groups, SAMPLE_COLUMNS] on the GPU, or flat: addresses of the
            places and of the bits, number of changes, whether the bits are added,
            address of the sample, number of its elements, and places from run to run.
        width: bytes of an element.
        place_bytes: of a place, 4 or 8.

    """
    _sample[(rows.numel() // SAMPLE_COLUMNS,)](
        rows,
        PLACE=INTEGERS[place_bytes],
        INTEGER=INTEGERS[width],
        COLUMNS=SAMPLE_COLUMNS,
        RUNS=NUM_RUNS,
        RUN=RUN,
        STEPS=SEARCH_STEPS,
        num_warps=NUM_WARPS,
    )
