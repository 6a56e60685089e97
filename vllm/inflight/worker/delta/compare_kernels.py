"""Comparing whole tensors with what is served, on a GPU: two launches for a batch.

The first launch counts the elements that differ, so that the log can make room for
them, and notes where they are. The second one logs them, and reads nothing else.
Copies of different element widths, or that are not read in words, take launches of
their own.

Both read a tensor in words of 8 bytes, unless it is served in shorter runs. A unit is
such a word, or one element.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""Units that a program of `count` notes at most, where the log has memory for so many
notes. Where more differ, `log` reads them all. The notes take a 32nd of the bytes of a
tensor that is read in words."""

NOTED_PER_STEP = 256
"""Noted units that a program of `log` reads at once."""

COLUMNS = 6 + 3 * MOST_DIMS
"""int64 values of a row: addresses of the tensor's part and of the parameter's view,
number of units, number of the first program, offset of the view in the parameter; the
number of dimensions, and of each the size and both strides, in units."""

ROOM_COLUMNS = 3
"""int64 values of the room of a row in the log: addresses of the offsets and of the
bits, 0 where there is none, and number of the first element."""

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
    num_dims = tl.load(row + 5).to(tl.int32)
    # The last dimension changes fastest, and the first one takes what is left.
    for done in range(1, num_dims):
        dim = row + 6 + 3 * (num_dims - done)
        size = tl.load(dim).to(tl.uint32)
        rest = left // size
        index = (left - rest * size).to(tl.int32)
        start += index * tl.load(dim + 1).to(tl.int32)
        to += index * tl.load(dim + 2).to(tl.int32)
        left = rest
    start += left.to(tl.int32) * tl.load(row + 7).to(tl.int32)
    to += left.to(tl.int32) * tl.load(row + 8).to(tl.int32)
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
    do_not_specialize=["base", "num_rows", "num_programs", "most"],
    do_not_specialize_on_alignment=["rows", "owners", "found", "units"],
)
def _count(
    rows,
    owners,
    found,
    units,
    base,
    num_rows,
    num_programs,
    most,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program = base + tl.program_id(0)
    owner = tl.load(owners + program)
    row = rows + owner.to(tl.int64) * COLUMNS
    num = tl.load(row + 2).to(tl.int32)
    first = (program - tl.load(row + 3).to(tl.int32)) * BLOCK
    notes = units + program.to(tl.int64) * most
    num_found = 0
    num_noted = 0
    for start in range(0, tl.minimum(num - first, BLOCK), LANES):
        lane = start + tl.arange(0, LANES)
        _, new, served = _compared(row, first + lane, num, UNIT)
        differing = _num_differing(new, served, WIDTH, INTEGER, PIECES)
        has_any = differing > 0
        rank = num_noted + tl.cumsum(has_any.to(tl.int32), 0) - 1
        tl.store(notes + rank, lane.to(tl.int16), mask=has_any & (rank < most))
        # Both numbers in one sum.
        both = tl.sum(differing | (has_any.to(tl.int32) << 16), 0)
        num_found += both & 0xFFFF
        num_noted += both >> 16
    of_program = found + num_rows + program
    # Programs take their places in the row as they come: a log has no order.
    begin = tl.atomic_add(found + owner, num_found, sem="relaxed")
    tl.store(of_program, begin)
    tl.store(of_program + num_programs, num_found)
    tl.store(of_program + 2 * num_programs, num_noted)


@triton.jit(
    do_not_specialize=["base", "num_rows", "num_programs", "most"],
    do_not_specialize_on_alignment=[
        *("rows", "owners", "found", "units", "rooms", "sums")
    ],
)
def _log(
    rows,
    owners,
    found,
    units,
    rooms,
    sums,
    base,
    num_rows,
    num_programs,
    most,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    UNIT: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROOM_COLUMNS: tl.constexpr,
):
    """Log what differs, and no more elements than were counted.

    What is served may change between both launches, by a rollback after an abort. Then
    other elements differ than were counted, and nothing is written beyond their room.
    """
    program = base + tl.program_id(0)
    owner = tl.load(owners + program).to(tl.int64)
    row = rows + owner * COLUMNS
    room = rooms + owner * ROOM_COLUMNS
    of_program = found + num_rows + program
    begin = tl.load(of_program).to(tl.int64)
    num = tl.load(of_program + num_programs).to(tl.int64)
    if (num > 0) & (tl.load(room) != 0):
        first = (program - tl.load(row + 3).to(tl.int32)) * BLOCK
        in_row = tl.load(row + 2).to(tl.int32)
        offset = tl.load(row + 4).to(tl.int32)
        offsets = tl.load(room).to(tl.pointer_type(tl.int32)) + begin
        bits = tl.load(room + 1).to(tl.pointer_type(INTEGER)) + begin
        place = tl.load(room + 2) + begin
        noted = tl.load(of_program + 2 * num_programs)
        notes = units + program.to(tl.int64) * most
        is_noted = noted <= most
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


class Programs(NamedTuple):
    """Programs that are alike, and follow one another.

    Attributes:
        base: number of the first one.
        num: how many.
        width: bytes of an element.
        in_words: whether the units are words of 8 bytes.

    """

    base: int
    num: int
    width: int
    in_words: bool


class Table(NamedTuple):
    """Copies that are compared at once.

    Attributes:
        rows: int64 [copies, COLUMNS], flat, on the GPU.
        owners: the row of each program; int32.
        num_rows: copies.
        num_programs: programs.
        groups: all programs.

    """

    rows: torch.Tensor
    owners: torch.Tensor
    num_rows: int
    num_programs: int
    groups: Sequence[Programs]


class Counted(NamedTuple):
    """What `count` finds, int32.

    Attributes:
        found: elements that differ in each copy. Then three numbers for each program,
            one after the other for all of them: its first element among those of its
            copy, its elements that differ, and its units that differ.
        units: numbers of these units in the program, `most` for each; int16.
        most: units that each program could note.

    """

    found: torch.Tensor
    units: torch.Tensor
    most: int


def _options(width: int, *, in_words: bool) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "INTEGER": INTEGERS[width],
        "UNIT": INTEGERS[WORD if in_words else width],
        "PIECES": WORD // width if in_words else 1,
        "BLOCK": BLOCK,
        "COLUMNS": COLUMNS,
    }


def count(table: Table, notes: torch.Tensor) -> Counted:
    """Count the elements that differ.

    Args:
        table: what is compared.
        notes: memory for the numbers of the units that differ, until they are logged;
            int16. With little of it `log` reads more.

    """
    device = table.rows.device
    num_rows, num = table.num_rows, table.num_programs
    found = torch.zeros(num_rows + 3 * num, dtype=torch.int32, device=device)
    most = min(MOST_NOTED, len(notes) // max(num, 1))
    for group in table.groups:
        _count[(group.num,)](
            *(table.rows, table.owners, found, notes, group.base, num_rows, num, most),
            **_options(group.width, in_words=group.in_words),
            LANES=LANES,
        )
    return Counted(found, notes, most)


def log(
    table: Table, counted: Counted, rooms: torch.Tensor, sums: torch.Tensor
) -> None:
    """Log the elements that differ, with the bits that the update brings.

    Args:
        table: as of `count`.
        counted: what `count` returned.
        rooms: int64 [copies, ROOM_COLUMNS], the room of each copy in the log.
        sums: of the log, see change_log.py.

    """
    for group in table.groups:
        _log[(group.num,)](
            *(table.rows, table.owners, counted.found, counted.units, rooms, sums),
            *(group.base, table.num_rows, table.num_programs, counted.most),
            **_options(group.width, in_words=group.in_words),
            STEP=NOTED_PER_STEP,
            ROOM_COLUMNS=ROOM_COLUMNS,
        )
