"""Finding, encoding, decoding and applying changes on a GPU; docs/delta-format.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm.inflight.delta.part import CHUNK_CODES

BYTES_PER_PROGRAM = 32 << 10
"""Bytes of a tensor that a program compares; a block has a whole number of these."""

LANES_PER_STEP = 1024
"""Lanes that a program compares at once."""

LANES_NOTED = 1024
"""Lanes that a program of `count` can note: a quarter of those of 8 bytes."""

LANES_TO_BRING = 128
"""Lanes that a program of `compact` reads at once: one for each thread."""

COLUMNS = 16
"""int64 values of a row of `decode_gaps`, `decode_others` and `decode_runs`."""

SEARCH_COLUMNS = 6
"""int64 values of a row of `count` and `compact`."""

APPLY_COLUMNS = 7
"""int64 values of a row of `apply`."""

ENCODE_COLUMNS = 12
"""int64 values of a row of `measure` and `encode`."""

MEASURES = 5
"""Sums of `measure`: runs but the first; codes of gaps that are no places, of 1 byte
and of 2; differences without a code, of 1 byte and of 2."""

NO_FAULT = (1 << 63) - 1
FAULTS = (
    "a place is beyond the block",
    "the last code of the places is no place",
    "the table of chunks does not fit the codes",
    "fewer or more places than entries",
    "the codes of differences have another number of exceptions",
    "a run is empty",
    "a run is not behind the run before it",
)
"""What is wrong, by its number; of several faults of a row the first one is told."""

NUM_FAULTS = 8
ENTRIES_PER_STEP = 1024
"""Entries that a program encodes or applies; entries of `decode_others` or runs of
`decode_runs` that a program takes at once."""
SPAN = 4096
"""Elements of a bitmap, and entries, that a program of `decode_others` decodes."""
SHORT_RUN = 64
"""Elements of a run that is written side by side with others."""
INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


# No argument is specialised, because compiling holds the interpreter's lock. The kernel
# that was compiled at start-up has to fit every tensor.
@triton.jit(
    do_not_specialize_on_alignment=["rows", "owners", "counts", "num_lanes", "lanes"]
)
def _count(
    rows,
    owners,
    counts,
    num_lanes,
    lanes,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
    STEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = rows + tl.load(owners + program).to(tl.int64) * 6
    old = tl.load(row).to(tl.pointer_type(INTEGER))
    new = tl.load(row + 1).to(tl.pointer_type(INTEGER))
    is_own = tl.load(row + 4) == WIDTH
    num = tl.where(is_own, tl.load(row + 2), 0)
    first = (program - tl.load(row + 3)) * BLOCK
    num_found = 0
    num_noted = 0
    for start in range(0, tl.minimum(num - first, BLOCK), LANES * PIECES):
        lane = start // PIECES + tl.arange(0, LANES)
        num_changed = tl.zeros((LANES,), tl.int32)
        # Without a mask, and in words of 8 bytes, many elements are read by one
        # instruction.
        if PIECES > 1 and first + start + LANES * PIECES <= num:
            at = first // PIECES + lane
            old_words = old.to(tl.pointer_type(tl.int64)) + at
            new_words = new.to(tl.pointer_type(tl.int64)) + at
            old_words = tl.multiple_of(tl.max_contiguous(old_words, LANES), 16)
            new_words = tl.multiple_of(tl.max_contiguous(new_words, LANES), 16)
            differing = tl.load(old_words) ^ tl.load(new_words)
            for piece in tl.static_range(PIECES):
                bits = (differing >> (8 * WIDTH * piece)) & ((1 << (8 * WIDTH)) - 1)
                num_changed += (bits != 0).to(tl.int32)
        else:
            for piece in tl.static_range(PIECES):
                at = first + lane * PIECES + piece
                before = tl.load(old + at, mask=at < num, other=0)
                now = tl.load(new + at, mask=at < num, other=0)
                num_changed += (before != now).to(tl.int32)
        has_changed = num_changed > 0
        rank = num_noted + tl.cumsum(has_changed.to(tl.int32), 0) - 1
        to = lanes + program * MOST + rank
        tl.store(to, lane.to(tl.int16), mask=has_changed & (rank < MOST))
        # Both numbers in one sum.
        both = tl.sum(num_changed | (has_changed.to(tl.int32) << 16), 0)
        num_found += both & 0xFFFF
        num_noted += both >> 16
    tl.store(counts + program, num_found, mask=is_own)
    tl.store(num_lanes + program, num_noted, mask=is_own)


@triton.jit
def _read(
    address,
    first,
    is_wanted,
    num,
    in_words,
    INTEGER: tl.constexpr,
    PIECES: tl.constexpr,
):
    """The elements of lanes, from element `first` of each on, as words of 8 bytes."""
    width: tl.constexpr = INTEGER.primitive_bitwidth
    elements = address.to(tl.pointer_type(INTEGER))
    if in_words:
        words = address.to(tl.pointer_type(tl.int64))
        found = tl.load(words + first // PIECES, mask=is_wanted, other=0)
    else:
        found = tl.zeros_like(first)
        for piece in tl.static_range(PIECES):
            inside = is_wanted & (first + piece < num)
            bits = tl.load(elements + first + piece, mask=inside, other=0).to(tl.int64)
            if PIECES > 1:
                bits &= (1 << width) - 1
            found |= bits << (width * piece)
    return found


@triton.jit(
    do_not_specialize=["first_program"],
    do_not_specialize_on_alignment=[
        *("rows", "owners", "counts", "num_lanes", "lanes", "firsts"),
        *("places", "news", "differences", "torn"),
    ],
)
def _compact(
    rows,
    owners,
    counts,
    num_lanes,
    lanes,
    firsts,
    places,
    news,
    differences,
    torn,
    first_program,
    WIDTH: tl.constexpr,
    INTEGER: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MOST: tl.constexpr,
    STEP: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64) + first_program
    row = rows + tl.load(owners + program).to(tl.int64) * 6
    old = tl.load(row)
    new = tl.load(row + 1)
    num = tl.load(row + 2)
    in_block = tl.load(row + 5)
    is_own = tl.load(row + 4) == WIDTH
    first = (program - tl.load(row + 3)) * BLOCK
    # Then no lane ends behind the tensor, and one instruction reads it.
    in_words = (PIECES > 1) & (first + BLOCK <= num)
    to = tl.load(firsts + program) - tl.load(firsts + first_program)
    # Other programs write behind this room. A tensor that has changed since its
    # elements were counted has another number of them.
    room = to + tl.where(is_own, tl.load(counts + program), 0)
    num_lanes = tl.where(is_own, tl.load(num_lanes + program), 0)
    num_noted = tl.where(num_lanes <= MOST, num_lanes, 0)
    num_read = tl.where(num_lanes <= MOST, num_lanes, BLOCK // PIECES)
    for start in range(0, num_read, STEP):
        lane = start + tl.arange(0, STEP)
        is_wanted = lane < num_read
        noted = tl.load(lanes + program * MOST + lane, mask=lane < num_noted, other=0)
        lane = tl.where(lane < num_noted, noted.to(tl.int32), lane)
        at = first + lane.to(tl.int64) * PIECES
        # Each element is read once: no more are brought than are counted here.
        befores = _read(old, at, is_wanted, num, in_words, INTEGER, PIECES)
        nows = _read(new, at, is_wanted, num, in_words, INTEGER, PIECES)
        num_changed = tl.zeros((STEP,), tl.int32)
        for piece in tl.static_range(PIECES):
            before = (befores >> (8 * WIDTH * piece)).to(INTEGER)
            now = (nows >> (8 * WIDTH * piece)).to(INTEGER)
            num_changed += (before != now).to(tl.int32)
        entry = to + tl.cumsum(num_changed, 0) - num_changed
        to += tl.sum(num_changed, 0)
        for piece in tl.static_range(PIECES):
            before = (befores >> (8 * WIDTH * piece)).to(INTEGER)
            now = (nows >> (8 * WIDTH * piece)).to(INTEGER)
            differs = before != now
            fits = differs & (entry < room)
            place = (at + piece) & in_block
            tl.store(places + entry, place.to(tl.int32), mask=fits)
            tl.store(news + entry, now.to(tl.int64), mask=fits)
            # The difference wraps in the element's width.
            difference = (now - before).to(INTEGER)
            tl.store(differences + entry, difference.to(tl.int64), mask=fits)
            entry += differs.to(tl.int32)
    if to != room:
        tl.store(torn, 1)


@triton.jit
def _entries_of(row, program, places, differences, LANES: tl.constexpr):
    """Entries of a program: their numbers in the block, places, gaps and zigzags."""
    entry = (program - tl.load(row + 2)) * LANES + tl.arange(0, LANES)
    inside = entry < tl.load(row + 1)
    at = tl.load(row) + entry
    place = tl.load(places + at, mask=inside, other=0).to(tl.int64)
    is_later = inside & (entry > 0)
    place_before = tl.load(places + at - 1, mask=is_later, other=0).to(tl.int64)
    gap = tl.where(is_later, place - place_before - 1, 0)
    difference = tl.load(differences + at, mask=inside, other=0)
    zigzag = (difference << 1) ^ (difference >> 63)
    return entry, inside, at, place, gap, difference, zigzag


@triton.jit(
    do_not_specialize=["num_programs"],
    do_not_specialize_on_alignment=["rows", "owners", "places", "differences", "sums"],
)
def _measure(
    rows, owners, places, differences, sums, num_programs, LANES: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    row = rows + tl.load(owners + program).to(tl.int64) * 12
    _, inside, _, _, gap, _, zigzag = _entries_of(
        row, program, places, differences, LANES
    )
    escapes1 = inside & ((zigzag < 0) | (zigzag >= 0xFF))
    escapes2 = inside & ((zigzag < 0) | (zigzag >= 0xFFFF))
    to = sums + program
    tl.store(to, tl.sum((gap > 0).to(tl.int64), 0))
    tl.store(to + num_programs, tl.sum(gap // 0xFF, 0))
    tl.store(to + 2 * num_programs, tl.sum(gap // 0xFFFF, 0))
    tl.store(to + 3 * num_programs, tl.sum(escapes1.to(tl.int64), 0))
    tl.store(to + 4 * num_programs, tl.sum(escapes2.to(tl.int64), 0))


@triton.jit
def _sum_before(sums, program, first_program):
    """What the programs of the same block before this one add up to.

    `sums` is a measure, summed up over the programs of all blocks.
    """
    end = tl.load(sums + program - 1, mask=program > 0, other=0)
    start = tl.load(sums + first_program - 1, mask=first_program > 0, other=0)
    return end - start


@triton.jit(
    do_not_specialize=["num_programs"],
    do_not_specialize_on_alignment=[
        *("rows", "owners", "places", "news", "differences", "sums", "data")
    ],
)
def _encode(
    rows,
    owners,
    places,
    news,
    differences,
    sums,
    data,
    num_programs,
    LANES: tl.constexpr,
    CODES: tl.constexpr,
    MOST_BYTES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = rows + tl.load(owners + program).to(tl.int64) * 12
    entry, inside, at, place, gap, difference, zigzag = _entries_of(
        row, program, places, differences, LANES
    )
    num = tl.load(row + 1)
    first_program = tl.load(row + 2)
    width = tl.load(row + 3)
    form = tl.load(row + 4)
    code_bytes = tl.load(row + 5)
    # One for each lane, because masks are combined with them.
    lanes = tl.zeros((LANES,), tl.int64)
    place -= tl.load(row + 6)
    chunks = (data + tl.load(row + 8)).to(tl.pointer_type(tl.int32))
    section = data + tl.load(row + 9)
    values = data + tl.load(row + 10)
    exceptions = data + tl.load(row + 11)

    # Values: new bits, or codes and the exceptions among them.
    has_codes = lanes + code_bytes > 0
    is_escape = (zigzag < 0) | (zigzag >= tl.where(code_bytes == 2, 0xFFFF, 0xFF))
    is_escape = is_escape & inside & has_codes
    measure = sums + (code_bytes + 2) * num_programs
    escapes = _sum_before(measure, program, first_program)
    escapes = tl.where(code_bytes > 0, escapes, 0)
    exception = escapes + tl.cumsum(is_escape.to(tl.int64), 0) - 1
    escapes_before = exception + 1 - is_escape.to(tl.int64)
    new = tl.load(news + at, mask=inside, other=0)
    value = tl.where(is_escape, -1, zigzag)
    value = tl.where(has_codes, value, new)
    size = lanes + tl.where(code_bytes > 0, code_bytes, width)
    for byte in tl.static_range(MOST_BYTES):
        bits = ((value >> (8 * byte)) & 0xFF).to(tl.uint8)
        tl.store(values + entry * size + byte, bits, mask=inside & (size > byte))
        bits = ((difference >> (8 * byte)) & 0xFF).to(tl.uint8)
        is_own = is_escape & (lanes + width > byte)
        tl.store(exceptions + exception * width + byte, bits, mask=is_own)

    if form <= 2:
        # Each entry writes its maximal codes, then the code of its place.
        most = tl.where(form == 2, 0xFFFF, 0xFF)
        maximal = gap // most
        rest = gap % most
        code = entry + tl.cumsum(maximal, 0) - maximal
        code += _sum_before(sums + form * num_programs, program, first_program)
        for step in range(0, tl.max(maximal, 0) + 1):
            is_code = inside & (step <= maximal)
            word = tl.where(step < maximal, most, rest)
            to = code + step
            tl.store(section + to * form, (word & 0xFF).to(tl.uint8), mask=is_code)
            tl.store(
                section + to * form + 1,
                (word >> 8).to(tl.uint8),
                mask=is_code & (lanes + form == 2),
            )
            is_first = is_code & (to % CODES == 0)
            state = chunks + to // CODES * 3
            position = place - gap + step * most
            tl.store(state, position.to(tl.int32), mask=is_first)
            tl.store(state + 1, entry.to(tl.int32), mask=is_first)
            tl.store(state + 2, escapes_before.to(tl.int32), mask=is_first)
    elif form == 3:
        words = section.to(tl.pointer_type(tl.int32))
        bit = (tl.full((LANES,), 1, tl.int64) << (place % 32)).to(tl.int32)
        tl.atomic_or(words + place // 32, bit, mask=inside)
    elif form == 4:
        words = section.to(tl.pointer_type(tl.int32))
        is_later = inside & (gap > 0)
        is_start = is_later | (inside & (entry == 0))
        run = tl.cumsum(is_later.to(tl.int64), 0)
        run += _sum_before(sums, program, first_program)
        tl.store(words + 2 * run, place.to(tl.int32), mask=is_start)
        # The length of a run is where the next one starts, minus where it starts.
        number = entry.to(tl.int32)
        tl.atomic_add(words + 2 * run - 1, number, mask=is_later)
        tl.atomic_add(words + 2 * run + 1, -number, mask=is_start)
        is_last = inside & (entry == num - 1)
        tl.atomic_add(words + 2 * run + 1, number + 1, mask=is_last)


@triton.jit
def _left(num, done):
    """How many of `num` are left, 0 to 2**31 - 1; both are of int64."""
    return tl.minimum(tl.maximum(num - done, 0), 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _values(
    values,
    exceptions,
    entries,
    entry,
    is_sound,
    escapes,
    num_exceptions,
    code_bytes,
    INTEGER: tl.constexpr,
):
    """The bits of these entries, and which of them are exceptions.

    `entries` and `escapes` are the numbers of entries and of exceptions before them,
    and `entry` counts from there.
    """
    # One for each lane, because masks are combined with them.
    of_lane = code_bytes.to(tl.int32) + tl.zeros_like(entry)
    is_raw = of_lane == 0
    raw = values.to(tl.pointer_type(INTEGER)) + entries
    raw = tl.load(raw + entry, mask=is_sound & is_raw, other=0)
    coded = values + entries * code_bytes + entry * of_lane
    is_coded = is_sound & (of_lane > 0)
    value = tl.load(coded, mask=is_coded, other=0).to(tl.int32)
    is_wide = is_coded & (of_lane == 2)
    value += tl.load(coded + 1, mask=is_wide, other=0).to(tl.int32) << 8
    is_escape = is_coded & (value == tl.where(of_lane == 2, 0xFFFF, 0xFF))
    exception = tl.cumsum(is_escape.to(tl.int32), 0) - 1
    wide = tl.load(
        exceptions.to(tl.pointer_type(INTEGER)) + escapes + exception,
        mask=is_escape & (exception < _left(num_exceptions, escapes)),
        other=0,
    )
    difference = ((value >> 1) ^ (0 - (value & 1))).to(INTEGER)
    difference = tl.where(is_escape, wide, difference)
    return tl.where(is_raw, raw, difference), is_escape


@triton.jit(do_not_specialize_on_alignment=["rows", "owners", "data", "fault"])
def _decode_gaps(
    rows,
    owners,
    data,
    fault,
    PLACE: tl.constexpr,
    INTEGER: tl.constexpr,
    CODES: tl.constexpr,
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
    gap_bytes = tl.load(row + 6).to(tl.int32) + tl.zeros((CODES,), tl.int32)
    code_bytes = tl.load(row + 7)
    chunks = data + tl.load(row + 8)
    gaps = data + tl.load(row + 9)
    values = data + tl.load(row + 10)
    exceptions = data + tl.load(row + 11)
    chunk = program - tl.load(row + 12)
    places = tl.load(row + 13).to(tl.pointer_type(PLACE))
    bits = tl.load(row + 14).to(tl.pointer_type(INTEGER))

    # The state before the chunk: three u32. Lanes count from there, in 32 bits: with 64
    # they need so many registers that few programs run at a time.
    state = chunks.to(tl.pointer_type(tl.int32)) + chunk * 3
    position = tl.load(state).to(tl.int64) & 0xFFFFFFFF
    entries = tl.load(state + 1).to(tl.int64) & 0xFFFFFFFF
    escapes = tl.load(state + 2).to(tl.int64) & 0xFFFFFFFF

    lane = tl.arange(0, CODES)
    left = _left(num_codes, chunk * CODES)
    inside = lane < left
    gap = gaps + chunk * CODES * tl.load(row + 6) + lane * gap_bytes
    code = tl.load(gap, mask=inside, other=0).to(tl.int32)
    is_wide = inside & (gap_bytes == 2)
    code += tl.load(gap + 1, mask=is_wide, other=0).to(tl.int32) << 8
    most = tl.where(gap_bytes == 2, 0xFFFF, 0xFF)
    is_place = inside & (code != most)
    steps = is_place.to(tl.int32)
    place = tl.cumsum(code + steps, 0) - 1
    entry = tl.cumsum(steps, 0) - 1
    # Only these are read and written, so that no code leads out of the buffers.
    is_beyond = is_place & (place >= _left(num_elements, position))
    is_sound = is_place & (entry < _left(num_entries, entries)) & (is_beyond == 0)

    value, is_escape = _values(
        values,
        exceptions,
        entries,
        entry,
        is_sound,
        escapes,
        num_exceptions,
        code_bytes,
        INTEGER,
    )
    places += entries
    at = (first + position + place).to(PLACE)
    tl.store(places + entry, at, mask=is_sound)
    tl.store(bits + entries + entry, value, mask=is_sound)

    # The state after the chunk is the one before the next chunk, or the row's end.
    position += tl.sum(code + steps, 0)
    before = entries
    entries += tl.sum(steps, 0)
    before_escapes = escapes
    escapes += tl.sum(is_escape.to(tl.int32), 0)
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
    is_end = is_place & (lane == left - 1)
    ends_open = is_last & (tl.sum(is_end.to(tl.int32), 0) == 0)
    beyond = tl.sum(is_beyond.to(tl.int32), 0) != 0
    miscounted = is_last & (entries != num_entries)
    misescaped = is_last & (escapes != num_exceptions)
    found = tl.where(misescaped, 4, 7)
    found = tl.where(miscounted, 3, found)
    found = tl.where(is_off, 2, found)
    found = tl.where(ends_open, 1, found)
    found = tl.where(beyond, 0, found)
    tl.atomic_min(fault, index * 8 + found, mask=found != 7)


@triton.jit
def _num_bits(octet):
    """How many bits of each byte are 1; int32."""
    # Counted in pairs, then in fours.
    octet -= (octet >> 1) & 0x55
    octet = (octet & 0x33) + ((octet >> 2) & 0x33)
    return (octet + (octet >> 4)) & 0x0F


@triton.jit(
    do_not_specialize=["num_programs"],
    do_not_specialize_on_alignment=["rows", "owners", "data", "tallies"],
)
def _tally(rows, owners, data, tallies, num_programs, SPAN: tl.constexpr):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 16
    start = (program - tl.load(row + 12)) * SPAN
    octets = start // 8 + tl.arange(0, SPAN // 8)
    is_bitmap = tl.load(row + 6) == 3
    num_octets = tl.where(is_bitmap, (tl.load(row + 2) + 7) // 8, 0)
    section = data + tl.load(row + 9)
    octet = tl.load(section + octets, mask=octets < num_octets, other=0).to(tl.int32)
    tl.store(tallies + program, tl.sum(_num_bits(octet), 0))
    code_bytes = tl.load(row + 7)
    num_codes = tl.where(code_bytes > 0, _left(tl.load(row + 3), start), 0)
    codes = data + tl.load(row + 10) + start * code_bytes
    lane = tl.arange(0, SPAN)
    inside = lane < num_codes
    # One for each lane, because masks are combined with them.
    of_lane = code_bytes.to(tl.int32) + tl.zeros((SPAN,), tl.int32)
    code = tl.load(codes + lane * of_lane, mask=inside, other=0).to(tl.int32)
    is_wide = inside & (of_lane == 2)
    more = tl.load(codes + lane * of_lane + 1, mask=is_wide, other=0)
    code += more.to(tl.int32) << 8
    is_escape = inside & (code == tl.where(of_lane == 2, 0xFFFF, 0xFF))
    tl.store(tallies + num_programs + program, tl.sum(is_escape.to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["num_programs"],
    do_not_specialize_on_alignment=["rows", "owners", "data", "sums", "fault"],
)
def _decode_others(
    rows,
    owners,
    data,
    sums,
    fault,
    num_programs,
    PLACE: tl.constexpr,
    INTEGER: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 16
    index = tl.load(row)
    first = tl.load(row + 1)
    num_elements = tl.load(row + 2)
    num_entries = tl.load(row + 3)
    num_exceptions = tl.load(row + 4)
    form = tl.load(row + 6)
    code_bytes = tl.load(row + 7)
    values = data + tl.load(row + 10)
    exceptions = data + tl.load(row + 11)
    first_program = tl.load(row + 12)
    places = tl.load(row + 13).to(tl.pointer_type(PLACE))
    bits = tl.load(row + 14).to(tl.pointer_type(INTEGER))
    own = (program - first_program) * SPAN
    num_bits = tl.where(form == 3, num_elements, 0)
    is_last = own + SPAN >= tl.maximum(num_bits, num_entries)
    found = index * 0 + 7
    # Lanes count from the span's beginning, in 32 bits, as in `_decode_gaps`.
    if form == 3:
        octets = data + tl.load(row + 9) + own // 8
        byte = tl.arange(0, SPAN // 8)
        num_octets = _left((num_bits + 7) // 8, own // 8)
        octet = tl.load(octets + byte, mask=byte < num_octets, other=0).to(tl.int32)
        num = _num_bits(octet)
        entries = _sum_before(sums, program, first_program).to(tl.int64)
        entry = tl.cumsum(num, 0) - num
        num_left = _left(num_entries, entries)
        is_beyond = octet < 0
        for bit in tl.static_range(8):
            is_place = ((octet >> bit) & 1) != 0
            place = 8 * byte + bit
            to = places + entries + entry
            at = (first + own + place).to(PLACE)
            is_out = place >= _left(num_bits, own)
            # No place beyond the block is written, as others may read it.
            is_sound = is_place & (entry < num_left) & (is_out == 0)
            tl.store(to, at, mask=is_sound)
            is_beyond |= is_place & is_out
            entry += is_place.to(tl.int32)
        entries += tl.sum(num, 0)
        found = tl.where(is_last & (entries != num_entries), 3, found)
        found = tl.where(tl.sum(is_beyond.to(tl.int32), 0) != 0, 0, found)
    lane = tl.arange(0, LANES)
    # One for each lane, because masks are combined with them.
    is_whole = (form.to(tl.int32) + tl.zeros((LANES,), tl.int32)) == 5
    escapes = _sum_before(sums + num_programs, program, first_program).to(tl.int64)
    for start in range(own, tl.minimum(own + SPAN, num_entries), LANES):
        inside = lane < _left(num_entries, start)
        at = (first + start + lane).to(PLACE)
        tl.store(places + start + lane, at, mask=inside & is_whole)
        value, is_escape = _values(
            values,
            exceptions,
            start,
            lane,
            inside,
            escapes,
            num_exceptions,
            code_bytes,
            INTEGER,
        )
        tl.store(bits + start + lane, value, mask=inside)
        escapes += tl.sum(is_escape.to(tl.int32), 0)
    misescaped = is_last & (escapes != num_exceptions)
    found = tl.where(misescaped & (found == 7), 4, found)
    tl.atomic_min(fault, index * 8 + found, mask=found != 7)


@triton.jit(do_not_specialize_on_alignment=["rows", "data", "fault"])
def _decode_runs(
    rows,
    data,
    fault,
    PLACE: tl.constexpr,
    LANES: tl.constexpr,
    SHORT: tl.constexpr,
):
    row = rows + tl.program_id(0).to(tl.int64) * 16
    index = tl.load(row)
    first = tl.load(row + 1)
    num_elements = tl.load(row + 2)
    num_entries = tl.load(row + 3)
    num_codes = tl.load(row + 5)
    words = (data + tl.load(row + 9)).to(tl.pointer_type(tl.int32))
    places = tl.load(row + 13).to(tl.pointer_type(PLACE))
    lane = tl.arange(0, LANES)
    entries = index * 0
    num_beyond = entries
    num_empty = entries
    num_back = entries
    for start in range(0, num_codes, LANES):
        run = start + lane
        inside = run < num_codes
        begin = tl.load(words + 2 * run, mask=inside, other=0).to(tl.int64)
        begin = begin & 0xFFFFFFFF
        length = tl.load(words + 2 * run + 1, mask=inside, other=0).to(tl.int64)
        length = length & 0xFFFFFFFF
        is_later = inside & (run > 0)
        end = tl.load(words + 2 * run - 2, mask=is_later, other=0).to(tl.int64)
        end = end & 0xFFFFFFFF
        size = tl.load(words + 2 * run - 1, mask=is_later, other=0).to(tl.int64)
        end += size & 0xFFFFFFFF
        num_empty += tl.sum((inside & (length == 0)).to(tl.int64), 0)
        num_back += tl.sum((is_later & (begin < end)).to(tl.int64), 0)
        is_beyond = inside & (begin + length > num_elements)
        num_beyond += tl.sum(is_beyond.to(tl.int64), 0)
        # Only so many are written, so that no run leads out of the buffers.
        to = entries + tl.cumsum(length, 0) - length
        room = tl.minimum(length, tl.maximum(num_entries - to, 0))
        longest = tl.max(room, 0)
        for more in range(0, tl.minimum(longest, SHORT)):
            place = (first + begin + more).to(PLACE)
            is_sound = (more < room) & (begin + more < num_elements)
            tl.store(places + to + more, place, mask=is_sound)
        if longest > SHORT:
            # What is left of long runs is written run by run.
            at = entries
            for one in range(start, tl.minimum(start + LANES, num_codes)):
                begin_of = tl.load(words + 2 * one).to(tl.int64) & 0xFFFFFFFF
                size_of = tl.load(words + 2 * one + 1).to(tl.int64) & 0xFFFFFFFF
                room_of = tl.minimum(size_of, tl.maximum(num_entries - at, 0))
                for more in range(SHORT, room_of, LANES):
                    step = more + lane
                    place = (first + begin_of + step).to(PLACE)
                    is_sound = (step < room_of) & (begin_of + step < num_elements)
                    tl.store(places + at + step, place, mask=is_sound)
                at += size_of
        entries += tl.sum(length, 0)
    found = index * 0 + 7
    found = tl.where(entries != num_entries, 3, found)
    found = tl.where(num_beyond != 0, 0, found)
    found = tl.where(num_back != 0, 6, found)
    found = tl.where(num_empty != 0, 5, found)
    tl.atomic_min(fault, index * 8 + found, mask=found != 7)


@triton.jit(do_not_specialize_on_alignment=["rows", "owners"])
def _apply(rows, owners, INTEGER: tl.constexpr, LANES: tl.constexpr):
    program = tl.program_id(0)
    row = rows + tl.load(owners + program).to(tl.int64) * 7
    places = tl.load(row).to(tl.pointer_type(tl.int64))
    bits = tl.load(row + 1).to(tl.pointer_type(INTEGER))
    tensor = tl.load(row + 2).to(tl.pointer_type(INTEGER))
    size = tl.load(row + 3)
    num = tl.load(row + 4)
    entry = (program - tl.load(row + 5)) * LANES + tl.arange(0, LANES)
    # One for each lane, because masks are combined with them.
    is_added = (tl.load(row + 6) + tl.zeros((LANES,), tl.int64)) != 0
    place = tl.load(places + entry, mask=entry < num, other=-1)
    inside = (place >= 0) & (place < size)
    change = tl.load(bits + entry, mask=inside, other=0)
    before = tl.load(tensor + place, mask=inside & is_added, other=0)
    tl.store(tensor + place, (before + change).to(INTEGER), mask=inside)


class Differing(NamedTuple):
    """What `count` finds, for each of its programs.

    A program compares `BYTES_PER_PROGRAM`, in lanes of 8 bytes or of an element. It
    notes which lanes differ, so that `compact` reads only those. Where most of them
    differ, they do not fit, and `compact` reads all lanes.
    """

    counts: torch.Tensor
    """Elements that differ; int32 [programs]."""
    num_lanes: torch.Tensor
    """Lanes that differ; int32 [programs]."""
    lanes: torch.Tensor
    """Their numbers; int16 [programs, LANES_NOTED]."""

    @classmethod
    def room(cls, num_programs: int, device: torch.device) -> Differing:
        """Memory for so many programs."""
        shapes = (num_programs,), (num_programs,), (num_programs, LANES_NOTED)
        dtypes = torch.int32, torch.int32, torch.int16
        return cls(
            *(
                torch.empty(shape, dtype=dtype, device=device)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
        )


def _options(width: int, *, is_aligned: bool) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "INTEGER": INTEGERS[width],
        "PIECES": 8 // width if is_aligned else 1,
        "BLOCK": BYTES_PER_PROGRAM // width,
        "LANES": LANES_PER_STEP,
        "MOST": LANES_NOTED,
        "STEP": LANES_TO_BRING,
    }


def count(
    rows: torch.Tensor,
    owners: torch.Tensor,
    found: Differing,
    width: int,
    *,
    is_aligned: bool,
) -> None:
    """Find the elements that differ, in tensors of one element width.

    Args:
        rows: int64 [tensors, SEARCH_COLUMNS] on the GPU; device_encode.py fills it.
        owners: the row of each program; int32.
        found: gets what each program of such a tensor finds.
        width: bytes of an element.
        is_aligned: whether all addresses are multiples of 16.

    """
    _count[(len(owners),)](
        *(rows, owners, *found), **_options(width, is_aligned=is_aligned)
    )


def compact(
    rows: torch.Tensor,
    owners: torch.Tensor,
    found: Differing,
    firsts: torch.Tensor,
    programs: tuple[int, int],
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    torn: torch.Tensor,
    width: int,
    *,
    is_aligned: bool,
) -> None:
    """Bring the elements that differ, in tensors of one element width.

    Args:
        rows: as in `count`.
        owners: likewise.
        found: of `count`, with the same `is_aligned`.
        firsts: for each program, the elements that differ before; int64.
        programs: the first program that brings elements, and the end.
        entries: get the places in the block, the new bits, and the differences.
        torn: int64 [1]; gets 1 if other elements differ than were counted.
        width: bytes of an element.
        is_aligned: whether all addresses are multiples of 16.

    """
    _compact[(programs[1] - programs[0],)](
        *(rows, owners, *found, firsts, *entries, torn, programs[0]),
        **_options(width, is_aligned=is_aligned),
    )


def measure(
    rows: torch.Tensor,
    owners: torch.Tensor,
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sums: torch.Tensor,
) -> None:
    """Add up what the forms would cost.

    Args:
        rows: int64 [blocks, ENCODE_COLUMNS] on the GPU; device_encode.py fills it.
        owners: the row of each program; int32.
        entries: of `compact`.
        sums: gets the sums of each program; int64 [MEASURES, programs].

    """
    places, _, differences = entries
    _measure[(len(owners),)](
        *(rows, owners, places, differences, sums, len(owners)), LANES=ENTRIES_PER_STEP
    )


def encode(
    rows: torch.Tensor,
    owners: torch.Tensor,
    entries: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sums: torch.Tensor,
    data: torch.Tensor,
    most_bytes: int,
) -> None:
    """Write the sections of all blocks.

    Args:
        rows: as in `measure`, with the chosen forms and the offsets of the sections.
        owners: as in `measure`.
        entries: as in `measure`.
        sums: of `measure`, up to each program and with it.
        data: gets the sections; zero before, at an address that is a multiple of 8.
        most_bytes: bytes of the widest element.

    """
    _encode[(len(owners),)](
        *(rows, owners, *entries, sums, data, len(owners)),
        LANES=ENTRIES_PER_STEP,
        CODES=CHUNK_CODES,
        MOST_BYTES=most_bytes,
    )


def decode_gaps(
    rows: torch.Tensor,
    owners: torch.Tensor,
    data: torch.Tensor,
    fault: torch.Tensor,
    width: int,
    num_codes: int,
    *,
    place_bytes: int,
) -> None:
    """Decode all chunks of blocks of one width, in one launch.

    Args:
        rows: int64 [blocks, COLUMNS] on the GPU, or flat; device_decode.py fills it. It
            has the addresses that get the places and the bits.
        owners: the row of each chunk; int32.
        data: data of the part, at an address that is a multiple of 8.
        fault: becomes the least number of a fault: NUM_FAULTS times the index of the
            row, plus the number in FAULTS; NO_FAULT before.
        width: bytes of an element.
        num_codes: codes of a chunk.
        place_bytes: of a place, 4 or 8.

    """
    _decode_gaps[(len(owners),)](
        *(rows, owners, data, fault),
        PLACE=INTEGERS[place_bytes],
        INTEGER=INTEGERS[width],
        CODES=num_codes,
    )


def decode_others(
    rows: torch.Tensor,
    owners: torch.Tensor,
    data: torch.Tensor,
    fault: torch.Tensor,
    width: int,
    *,
    place_bytes: int,
) -> None:
    """Decode blocks of the other forms, of one width; of runs, their bits alone.

    A first launch counts what each program comes after.

    Args:
        rows: as in `decode_gaps`.
        owners: the row of each program, one for each SPAN of a row; int32.
        data: as in `decode_gaps`.
        fault: likewise.
        width: bytes of an element.
        place_bytes: as in `decode_gaps`.

    """
    num = len(owners)
    tallies = torch.empty((2, num), dtype=torch.int32, device=owners.device)
    _tally[(num,)](rows, owners, data, tallies, num, SPAN=SPAN, num_warps=8)
    sums = tallies.cumsum(1, dtype=torch.int32)
    _decode_others[(num,)](
        *(rows, owners, data, sums, fault, num),
        PLACE=INTEGERS[place_bytes],
        INTEGER=INTEGERS[width],
        SPAN=SPAN,
        LANES=ENTRIES_PER_STEP,
    )


def decode_runs(
    rows: torch.Tensor, data: torch.Tensor, fault: torch.Tensor, *, place_bytes: int
) -> None:
    """Decode the places of all blocks of runs, in one launch.

    Args:
        rows: as in `decode_gaps`.
        data: likewise.
        fault: likewise.
        place_bytes: likewise.

    """
    _decode_runs[(rows.numel() // COLUMNS,)](
        *(rows, data, fault),
        PLACE=INTEGERS[place_bytes],
        LANES=ENTRIES_PER_STEP,
        SHORT=SHORT_RUN,
    )


def apply(rows: torch.Tensor, owners: torch.Tensor, width: int) -> None:
    """Write changes of one element width into their tensors, in one launch.

    Args:
        rows: int64 [groups, APPLY_COLUMNS] on the GPU, or flat: addresses of the
            places, of the bits and of the tensor, elements of the tensor, number of
            changes, number of the first program, and whether the bits are added.
        owners: the row of each program; int32.
        width: bytes of an element.

    """
    _apply[(len(owners),)](
        rows, owners, INTEGER=INTEGERS[width], LANES=ENTRIES_PER_STEP
    )


def fault_of(fault: int) -> tuple[int, str] | None:
    """(row, what is wrong) of the fault of a part; None if there is none."""
    if fault == NO_FAULT:
        return None
    row, what = divmod(fault, NUM_FAULTS)
    return row, FAULTS[what]
