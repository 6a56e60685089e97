"""Finding changes and decoding gaps on a GPU, by docs/delta-format.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

ELEMENTS_PER_PROGRAM = 4096
"""Elements that a program compares."""

COLUMNS = 16
"""int64 values of a row of `decode_gaps`."""

NO_FAULT = (1 << 63) - 1
FAULTS = (
    "a place is beyond the block",
    "the last code of the places is no place",
    "the table of chunks does not fit the codes",
    "fewer or more places than entries",
    "the codes of differences have another number of exceptions",
)
"""What is wrong, by its number; of several faults of a row the first one is told."""

NUM_FAULTS = 8
INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every tensor.
@triton.jit(
    do_not_specialize=["num"],
    do_not_specialize_on_alignment=["old", "new", "counts"],
)
def _count(old, new, counts, num, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    before = tl.load(old + at, mask=inside, other=0)
    now = tl.load(new + at, mask=inside, other=0)
    tl.store(counts + program, tl.sum((before != now).to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["num", "start"],
    do_not_specialize_on_alignment=["old", "new", "firsts", "places", "olds", "news"],
)
def _compact(old, new, firsts, places, olds, news, num, start, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    before = tl.load(old + at, mask=inside, other=0)
    now = tl.load(new + at, mask=inside, other=0)
    differs = before != now
    to = tl.load(firsts + program) + tl.cumsum(differs.to(tl.int32), 0) - 1
    tl.store(places + to, at + start, mask=differs)
    tl.store(olds + to, before, mask=differs)
    tl.store(news + to, now, mask=differs)


@triton.jit(
    do_not_specialize_on_alignment=["rows", "owners", "data", "places", "bits", "fault"]
)
def _decode_gaps(
    rows, owners, data, places, bits, fault, INTEGER: tl.constexpr, CODES: tl.constexpr
):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 16
    index = tl.load(row)
    first = tl.load(row + 1)
    num_elements = tl.load(row + 2)
    num_entries = tl.load(row + 3)
    num_exceptions = tl.load(row + 4)
    num_codes = tl.load(row + 5)
    # One for each lane, because masks are combined with them.
    gap_bytes = tl.load(row + 6) + tl.zeros((CODES,), tl.int64)
    code_bytes = tl.load(row + 7) + tl.zeros((CODES,), tl.int64)
    chunks = data + tl.load(row + 8)
    gaps = data + tl.load(row + 9)
    values = data + tl.load(row + 10)
    exceptions = data + tl.load(row + 11)
    chunk = program - tl.load(row + 12)
    places += tl.load(row + 13)
    bits += tl.load(row + 14)

    # The state before the chunk: three u32.
    state = chunks.to(tl.pointer_type(tl.int32)) + chunk * 3
    position = tl.load(state).to(tl.int64) & 0xFFFFFFFF
    entries = tl.load(state + 1).to(tl.int64) & 0xFFFFFFFF
    escapes = tl.load(state + 2).to(tl.int64) & 0xFFFFFFFF

    at = chunk * CODES + tl.arange(0, CODES)
    inside = at < num_codes
    gap = gaps + at * gap_bytes
    code = tl.load(gap, mask=inside, other=0).to(tl.int64)
    is_wide = inside & (gap_bytes == 2)
    code += tl.load(gap + 1, mask=is_wide, other=0).to(tl.int64) << 8
    most = tl.where(gap_bytes == 2, 0xFFFF, 0xFF)
    is_place = inside & (code != most)
    steps = is_place.to(tl.int64)
    place = position + tl.cumsum(code + steps, 0) - 1
    entry = entries + tl.cumsum(steps, 0) - 1
    # Only these are read and written, so that no code leads out of the buffers.
    is_sound = is_place & (place < num_elements) & (entry < num_entries)

    is_raw = code_bytes == 0
    raw = tl.load(
        values.to(tl.pointer_type(INTEGER)) + entry, mask=is_sound & is_raw, other=0
    )
    coded = values + entry * code_bytes
    is_coded = is_sound & (code_bytes > 0)
    value = tl.load(coded, mask=is_coded, other=0).to(tl.int64)
    is_wide = is_coded & (code_bytes == 2)
    value += tl.load(coded + 1, mask=is_wide, other=0).to(tl.int64) << 8
    is_escape = is_coded & (value == tl.where(code_bytes == 2, 0xFFFF, 0xFF))
    escaped = is_escape.to(tl.int64)
    exception = escapes + tl.cumsum(escaped, 0) - 1
    wide = tl.load(
        exceptions.to(tl.pointer_type(INTEGER)) + exception,
        mask=is_escape & (exception < num_exceptions),
        other=0,
    )
    difference = ((value >> 1) ^ (0 - (value & 1))).to(INTEGER)
    difference = tl.where(is_escape, wide, difference)
    tl.store(places + entry, first + place, mask=is_sound)
    new_bits = bits.to(tl.pointer_type(INTEGER)) + entry
    tl.store(new_bits, tl.where(is_raw, raw, difference), mask=is_sound)

    # The state after the chunk is the one before the next chunk, or the row's end.
    position += tl.sum(tl.where(inside, code + steps, 0), 0)
    before = entries
    entries += tl.sum(steps, 0)
    before_escapes = escapes
    escapes += tl.sum(escaped, 0)
    is_last = (chunk + 1) * CODES >= num_codes
    has_next = (chunk + 1) * CODES < num_codes
    next_position = tl.load(state + 3, mask=has_next, other=0).to(tl.int64)
    next_entries = tl.load(state + 4, mask=has_next, other=0).to(tl.int64)
    next_escapes = tl.load(state + 5, mask=has_next, other=0).to(tl.int64)
    is_off = has_next & (
        (position != (next_position & 0xFFFFFFFF))
        | (entries != (next_entries & 0xFFFFFFFF))
        | (escapes != (next_escapes & 0xFFFFFFFF))
    )
    start = tl.load(state).to(tl.int64) & 0xFFFFFFFF
    is_off |= (chunk == 0) & ((start != 0) | (before != 0) | (before_escapes != 0))
    is_end = is_place & (at == num_codes - 1)
    ends_open = is_last & (tl.sum(is_end.to(tl.int32), 0) == 0)
    beyond = tl.sum((is_place & (place >= num_elements)).to(tl.int32), 0) != 0
    miscounted = is_last & (entries != num_entries)
    misescaped = is_last & (escapes != num_exceptions)
    found = tl.where(misescaped, 4, 7)
    found = tl.where(miscounted, 3, found)
    found = tl.where(is_off, 2, found)
    found = tl.where(ends_open, 1, found)
    found = tl.where(beyond, 0, found)
    tl.atomic_min(fault, index * 8 + found, mask=found != 7)


def find(
    old: torch.Tensor, new: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(places, old bits, new bits) of the elements that differ.

    Args:
        old: a flat tensor of integers.
        new: another one.
        start: what is added to every place.

    """
    num = old.numel()
    programs = triton.cdiv(num, ELEMENTS_PER_PROGRAM)
    counts = torch.empty(programs, dtype=torch.int32, device=old.device)
    if not programs:
        return counts.to(torch.int64), old, new
    _count[(programs,)](old, new, counts, num, BLOCK=ELEMENTS_PER_PROGRAM)
    ends = counts.cumsum(0)
    total = int(ends[-1])
    places = torch.empty(total, dtype=torch.int64, device=old.device)
    olds, news = (old.new_empty(total) for _ in range(2))
    if total:
        _compact[(programs,)](
            *(old, new, ends - counts, places, olds, news, num, start),
            BLOCK=ELEMENTS_PER_PROGRAM,
        )
    return places, olds, news


def decode_gaps(
    rows: torch.Tensor,
    owners: torch.Tensor,
    data: torch.Tensor,
    places: torch.Tensor,
    bits: torch.Tensor,
    width: int,
    num_codes: int,
) -> torch.Tensor:
    """Decode all chunks of blocks of one width, in one launch.

    Args:
        rows: int64 [blocks, COLUMNS] on the GPU; device_decode.py fills it.
        owners: the row of each chunk; int32.
        data: data of the part, at an address that is a multiple of 8.
        places: gets the places.
        bits: gets the bits, at offsets that are multiples of the width.
        width: bytes of an element.
        num_codes: codes of a chunk.

    Returns:
        NO_FAULT, or NUM_FAULTS times the least index of a malformed row, plus the
        number of its fault; int64 on the GPU.

    """
    fault = torch.full((1,), NO_FAULT, dtype=torch.int64, device=data.device)
    _decode_gaps[(len(owners),)](
        *(rows, owners, data, places, bits, fault),
        INTEGER=INTEGERS[width],
        CODES=num_codes,
    )
    return fault


def fault_of(faults: Sequence[torch.Tensor]) -> tuple[int, str] | None:
    """(row, what is wrong) of the first fault of several launches."""
    least = min(int(fault) for fault in faults)
    if least == NO_FAULT:
        return None
    row, what = divmod(least, NUM_FAULTS)
    return row, FAULTS[what]
