"""Comparing whole tensors with what is served, on a GPU: two launches for a batch.

The first launch counts the elements that differ, so that the log can make room for
them, and notes where they are. The second one logs them, and reads nothing else.

Both read a tensor in words of 8 bytes, unless it is served in shorter runs. A unit is
such a word, or one element.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm.inflight.ops.triton_kernels import change_terms
from vllm.inflight.worker.delta.destinations import MOST_DIMS, WORD

BLOCK = 4096
"""Units that a program compares."""

LANES = 1024
"""Units that a program compares at once."""

MOST_NOTED = 512
"""Units that a program of `count` can note. Where more differ, `log` reads them all.
The notes take a 32nd of the bytes of a tensor that is read in words."""

NOTED_PER_STEP = 256
"""Noted units that a program of `log` reads at once."""

COLUMNS = 9 + 3 * MOST_DIMS
"""int64 values of a row: addresses of the tensor's part and of the parameter's view,
number of units, number of the first program, offset of the view in the parameter;
addresses of the offsets and of the bits in the log, and number of the first element
there; the number of dimensions, and of each the size and both strides, in units."""

INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def _compared(row, unit, num, UNIT: tl.constexpr):
    """Offsets of these units in the view, their new and their served bits.

    A unit that is not below `num` is the same in both. Numbers of 32 bits suffice: see
    `_can_follow` in dense.py.
    """
    inside = unit < num
    left = unit.to(tl.uint32)
    start = tl.zeros_like(unit)
    to = tl.zeros_like(unit)
    num_dims = tl.load(row + 8).to(tl.int32)
    # The last dimension changes fastest, and the first one takes what is left.
    for done in range(1, num_dims):
        dim = row + 9 + 3 * (num_dims - done)
        size = tl.load(dim).to(tl.uint32)
        rest = left // size
        index = (left - rest * size).to(tl.int32)
        start += index * tl.load(dim + 1).to(tl.int32)
        to += index * tl.load(dim + 2).to(tl.int32)
        left = rest
    start += left.to(tl.int32) * tl.load(row + 10).to(tl.int32)
    to += left.to(tl.int32) * tl.load(row + 11).to(tl.int32)
    source = tl.load(row).to(tl.pointer_type(UNIT))
    view = tl.load(row + 1).to(tl.pointer_type(UNIT))
    new = tl.load(source + start, mask=inside, other=0)
    served = tl.load(view + to, mask=inside, other=0)
    return to, new, served


@triton.jit
def _num_differing(
    new, served, WIDTH: tl.constexpr, INTEGER: tl.constexpr, PIECES: tl.constexpr
):
    """How many elements of each unit differ; int32."""
    num = tl.zeros(new.shape, tl.int32)
    for piece in tl.static_range(PIECES):
        now = (new >> (8 * WIDTH * piece)).to(INTEGER)
        before = (served >> (8 * WIDTH * piece)).to(INTEGER)
        num += (now != before).to(tl.int32)
    return num


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every tensor.
@triton.jit(
    do_not_specialize_on_alignment=["rows", "owners", "counts", "num_units", "units"]
)
def _count(
    rows,
    owners,
    counts,
    num_units,
    units,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * COLUMNS
    num = tl.load(row + 2).to(tl.int32)
    first = (program - tl.load(row + 3).to(tl.int32)) * BLOCK
    notes = units + program.to(tl.int64) * MOST
    num_found = 0
    num_noted = 0
    for start in range(0, tl.minimum(num - first, BLOCK), LANES):
        lane = start + tl.arange(0, LANES)
        _, new, served = _compared(row, first + lane, num, UNIT)
        differing = _num_differing(new, served, WIDTH, INTEGER, PIECES)
        has_any = differing > 0
        rank = num_noted + tl.cumsum(has_any.to(tl.int32), 0) - 1
        tl.store(notes + rank, lane.to(tl.int16), mask=has_any & (rank < MOST))
        # Both numbers in one sum.
        both = tl.sum(differing | (has_any.to(tl.int32) << 16), 0)
        num_found += both & 0xFFFF
        num_noted += both >> 16
    tl.store(counts + program, num_found)
    tl.store(num_units + program, num_noted)


@triton.jit(
    do_not_specialize_on_alignment=[
        *("rows", "owners", "ends", "num_units", "units", "sums")
    ]
)
def _log(
    rows,
    owners,
    ends,
    num_units,
    units,
    sums,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Log what differs, and no more elements than were counted.

    What is served may change between both launches, by a rollback after an abort. Then
    other elements differ than were counted, and nothing is written beyond their room.
    """
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * COLUMNS
    first_program = tl.load(row + 3).to(tl.int32)
    # `ends` has a zero before the count of the first program.
    begin = tl.load(ends + program)
    num = tl.load(ends + program + 1) - begin
    begin -= tl.load(ends + first_program)
    if (num > 0) & (tl.load(row + 5) != 0):
        first = (program - first_program) * BLOCK
        in_row = tl.load(row + 2).to(tl.int32)
        offset = tl.load(row + 4).to(tl.int32)
        offsets = tl.load(row + 5).to(tl.pointer_type(tl.int32)) + begin
        bits = tl.load(row + 6).to(tl.pointer_type(INTEGER)) + begin
        place = tl.load(row + 7) + begin
        noted = tl.load(num_units + program)
        notes = units + program.to(tl.int64) * MOST
        is_noted = noted <= MOST
        num_noted = tl.where(is_noted, noted, 0)
        done = 0
        a = tl.zeros((STEP,), tl.int64)
        b = tl.zeros((STEP,), tl.int64)
        for start in range(0, tl.where(is_noted, noted, BLOCK), STEP):
            lane = start + tl.arange(0, STEP)
            note = tl.load(notes + lane, mask=lane < num_noted, other=0)
            unit = first + tl.where(is_noted, note.to(tl.int32), lane)
            # One that is not noted is beyond the row, so nothing is read.
            unit = tl.where(is_noted & (lane >= noted), in_row, unit)
            to, new, served = _compared(row, unit, in_row, UNIT)
            differing = _num_differing(new, served, WIDTH, INTEGER, PIECES)
            number = done + tl.cumsum(differing, 0) - differing
            done += tl.sum(differing, 0)
            for piece in tl.static_range(PIECES):
                now = (new >> (8 * WIDTH * piece)).to(INTEGER)
                before = (served >> (8 * WIDTH * piece)).to(INTEGER)
                differs = now != before
                fits = differs & (number < num)
                at = offset + to * PIECES + piece
                tl.store(offsets + number, at, mask=fits)
                tl.store(bits + number, now, mask=fits)
                c, d = change_terms(
                    *((place + number) * WIDTH, before.to(tl.int64)),
                    *(now.to(tl.int64), WIDTH),
                )
                a += tl.where(differs, c, 0)
                b += tl.where(differs, d, 0)
                number += differs.to(tl.int32)
        # Relaxed, as in `_write` of triton_kernels.py.
        tl.atomic_add(sums, tl.sum(a, 0), sem="relaxed")
        tl.atomic_add(sums + 1, tl.sum(b, 0), sem="relaxed")
        tl.atomic_add(sums + 2, num, sem="relaxed")


class Counted(NamedTuple):
    """What `count` finds.

    Attributes:
        ends: elements that differ up to the end of each program, after a zero; int64
            [programs + 1].
        num_units: units that differ, of each program; int32 [programs].
        units: their numbers in the program; int16 [programs, MOST_NOTED].

    """

    ends: torch.Tensor
    num_units: torch.Tensor
    units: torch.Tensor


def _options(width: int, *, in_words: bool) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "INTEGER": INTEGERS[width],
        "UNIT": INTEGERS[WORD if in_words else width],
        "PIECES": WORD // width if in_words else 1,
        "BLOCK": BLOCK,
        "MOST": MOST_NOTED,
        "COLUMNS": COLUMNS,
    }


def count(
    rows: torch.Tensor, owners: torch.Tensor, width: int, *, in_words: bool
) -> Counted:
    """Count the elements that differ.

    Args:
        rows: int64 [copies, COLUMNS] on the GPU.
        owners: the row of each program; int32.
        width: bytes of an element.
        in_words: whether the units are words of 8 bytes.

    """
    num, device = len(owners), rows.device
    counts = torch.zeros(num + 1, dtype=torch.int32, device=device)
    num_units = torch.empty(num, dtype=torch.int32, device=device)
    units = torch.empty((num, MOST_NOTED), dtype=torch.int16, device=device)
    _count[(num,)](
        *(rows, owners, counts[1:], num_units, units),
        **_options(width, in_words=in_words),
        LANES=LANES,
    )
    return Counted(counts.cumsum(0, dtype=torch.int64), num_units, units)


def log(
    rows: torch.Tensor,
    owners: torch.Tensor,
    found: Counted,
    sums: torch.Tensor,
    width: int,
    *,
    in_words: bool,
) -> None:
    """Log the elements that differ, with the bits that the update brings.

    Args:
        rows: as of `count`, with addresses of the log; an address of 0 for a row that
            there is no room for.
        owners: as of `count`.
        found: what `count` returned.
        sums: of the log, see change_log.py.
        width: bytes of an element.
        in_words: as of `count`.

    """
    _log[(len(owners),)](
        *(rows, owners, *found, sums),
        **_options(width, in_words=in_words),
        STEP=NOTED_PER_STEP,
    )
