"""The format of docs/delta-format.md in plain torch arithmetic, for any device.

The code is slow and follows the definition; tests compare the native core and the
kernels with it. On a GPU it encodes, and decodes the forms that have no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from vllm.inflight.delta.part import (
    CHUNK_CODES,
    HEADER,
    MAGIC,
    ROW,
    VERSION,
    Block,
    Part,
    PlaceForm,
    ValueForm,
)
from vllm.inflight.errors import Malformed
from vllm.inflight.ops import INTEGERS

Sections = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Chunks, places, values, exceptions; flat uint8."""

CHUNK_BYTES = 12
CODE_BYTES: dict[int, int] = {PlaceForm.GAPS8: 1, PlaceForm.GAPS16: 2}


@dataclass(frozen=True, eq=False, slots=True)
class EncodedBlock:
    """A block that waits for its part; its row has no offsets yet."""

    row: Block
    sections: Sections

    @property
    def num_bytes(self) -> int:
        """Its bytes in a part."""
        return ROW.size + sum(_aligned(len(section)) for section in self.sections)


def section_bytes(row: Block) -> tuple[int, int, int, int]:
    """Bytes of the sections of a block."""
    gap = CODE_BYTES.get(row.form, 0)
    chunks = -(-row.num_codes // CHUNK_CODES) if gap else 0
    places = gap * row.num_codes
    if row.form == PlaceForm.BITMAP:
        places = -(-row.num_elements // 8)
    if row.form == PlaceForm.RUNS:
        places = 8 * row.num_codes
    value = row.width if row.values == ValueForm.RAW else row.code_bytes
    values, exceptions = value * row.num_entries, row.width * row.num_exceptions
    return CHUNK_BYTES * chunks, places, values, exceptions


def lay_out(rows: Sequence[Block]) -> tuple[list[Block], int]:
    """The rows with their offsets, and the bytes of `data`."""
    sizes = [section_bytes(row) for row in rows]
    end = 0
    offsets: list[list[int]] = [[] for _ in rows]
    for kind in range(4):
        for row in range(len(rows)):
            offsets[row].append(end)
            end += _aligned(sizes[row][kind])
    names = [field.name for field in fields(Block)][-4:]
    placed = [
        replace(row, **dict(zip(names, at, strict=True)))
        for row, at in zip(rows, offsets, strict=True)
    ]
    return placed, end


def assemble(blocks: Sequence[EncodedBlock], device: torch.device) -> Part:
    """A part of these blocks."""
    rows, size = lay_out([block.row for block in blocks])
    table = bytearray(HEADER.pack(MAGIC, VERSION, 0, len(rows), 0, size, size))
    for row in rows:
        table += ROW.pack(*(getattr(row, field.name) for field in fields(Block)))
    padding = torch.zeros(8, dtype=torch.uint8, device=device)
    sections = [block.sections[kind] for kind in range(4) for block in blocks]
    padded = [(each, padding[: -len(each) % 8]) for each in sections]
    data = torch.cat([piece for pair in padded for piece in pair])
    return Part(torch.frombuffer(table, dtype=torch.uint8).to(device), data)


def encode_block(
    number: int,
    places: torch.Tensor,
    old_bits: torch.Tensor,
    new_bits: torch.Tensor,
    values: int,
) -> EncodedBlock:
    """Encode the changes of one block.

    Args:
        number: number of the tensor.
        places: numbers of the changed elements in the tensor, at least one.
        old_bits: the elements before, as integers of their width.
        new_bits: the elements now.
        values: a `ValueForm`, or 0 for the smaller one.

    """
    width = new_bits.element_size()
    first, last = int(places[0]), int(places[-1])
    inside = places - first
    num, size = len(places), last - first + 1
    form, code_bytes, escapes, codes, exceptions = _encode_values(
        old_bits, new_bits, values
    )
    place_form, num_codes, chunks, place_codes = _encode_places(inside, size, escapes)
    row = Block(
        *(number, width, place_form, form, code_bytes, first, size, num),
        *(int(escapes.sum()), num_codes, 0, 0, 0, 0),
    )
    return EncodedBlock(row, (chunks, place_codes, codes, exceptions))


def choose_values(
    width: int, num: int, escapes: Sequence[int], values: int
) -> tuple[int, int]:
    """Form of the values of a block, and bytes of a code.

    Args:
        width: bytes of an element.
        num: entries of the block.
        escapes: differences that have no code of 1 byte, of 2 bytes.
        values: a `ValueForm`, or 0 for the smaller one.

    """
    candidates = [(num * width, ValueForm.RAW, 0)]
    for code_bytes, count in enumerate(escapes, 1):
        total = num * code_bytes + count * width
        candidates.append((total, ValueForm.DIFFERENCE, code_bytes))
    allowed = [each for each in candidates if values in (0, each[1])]
    _, form, code_bytes = min(allowed, key=lambda each: each[0])
    return form, code_bytes


def choose_places(
    num: int, size: int, codes8: int, codes16: int, runs: int
) -> tuple[int, int]:
    """Form of the places of a block, and number of their codes."""
    if num == size:
        return PlaceForm.WHOLE, 0
    rows = [
        Block(0, 1, form, ValueForm.RAW, 0, 0, size, num, 0, num_codes, 0, 0, 0, 0)
        for form, num_codes in (
            (PlaceForm.GAPS8, codes8),
            (PlaceForm.GAPS16, codes16),
            (PlaceForm.BITMAP, 0),
            (PlaceForm.RUNS, runs),
        )
    ]
    row = min(rows, key=lambda row: sum(section_bytes(row)[:2]))
    return row.form, row.num_codes


def zigzag_codes(difference: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, 3 of 0, -1, 1, -2; of 8 bytes it is negative if its top bit is set."""
    wide = difference.to(torch.int64)
    return (wide << 1) ^ (wide >> 63)


def escapes_of(zigzag: torch.Tensor, code_bytes: int) -> torch.Tensor:
    """The differences that have no code of so many bytes."""
    return (zigzag < 0) | (zigzag >= (1 << 8 * code_bytes) - 1)


def code_widths(width: int) -> tuple[int, ...]:
    """Bytes that a code of differences may have."""
    return (1, 2) if width >= 4 else (1,)


def _encode_values(
    old_bits: torch.Tensor, new_bits: torch.Tensor, values: int
) -> tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Form, bytes of a code, which are escapes, values, exceptions."""
    width, num = new_bits.element_size(), len(new_bits)
    difference = new_bits - old_bits  # wraps
    zigzag = zigzag_codes(difference)
    escapes = [escapes_of(zigzag, code_bytes) for code_bytes in code_widths(width)]
    counts = [int(each.sum()) for each in escapes]
    form, code_bytes = choose_values(width, num, counts, values)
    if form == ValueForm.RAW:
        none = torch.zeros_like(escapes[0])
        return form, 0, none, as_bytes(new_bits), as_bytes(new_bits[:0])
    own = escapes[code_bytes - 1]
    codes = zigzag.masked_fill(own, -1).to(INTEGERS[code_bytes])
    return form, code_bytes, own, as_bytes(codes), as_bytes(difference[own])


def _encode_places(
    inside: torch.Tensor, size: int, escapes: torch.Tensor
) -> tuple[int, int, torch.Tensor, torch.Tensor]:
    """Form, number of codes, chunks, places."""
    before = torch.cat((inside.new_full((1,), -1), inside[:-1]))
    gaps = inside - before - 1
    starts = gaps > 0
    starts[0] = True
    form, num_codes = choose_places(
        *(len(inside), size, len(inside) + int((gaps // 0xFF).sum())),
        *(len(inside) + int((gaps // 0xFFFF).sum()), int(starts.sum())),
    )
    nothing = inside[:0].to(torch.uint8)
    if form == PlaceForm.WHOLE:
        return form, 0, nothing, nothing
    if form == PlaceForm.BITMAP:
        bits = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=inside.device)
        bits[inside] = 1
        weights = 1 << torch.arange(8, device=inside.device)
        packed = (bits.view(-1, 8) * weights).sum(1)
        return form, 0, nothing, packed.to(torch.uint8)
    if form == PlaceForm.RUNS:
        first = inside[starts]
        entry = starts.nonzero().squeeze(1)
        ends = torch.cat((entry[1:], entry.new_full((1,), len(inside))))
        pairs = torch.stack((first, ends - entry), 1)
        return form, num_codes, nothing, as_bytes(pairs.to(torch.int32).reshape(-1))
    code_bytes = CODE_BYTES[form]
    most = (1 << 8 * code_bytes) - 1
    at = (gaps // most + 1).cumsum(0) - 1
    codes = torch.full((num_codes,), most, dtype=torch.int64, device=inside.device)
    codes[at] = gaps % most
    chunks = _chunks(codes, most, escapes)
    return form, num_codes, chunks, as_bytes(codes.to(INTEGERS[code_bytes]))


def _chunks(codes: torch.Tensor, most: int, escapes: torch.Tensor) -> torch.Tensor:
    """The table of chunks of a block, whose entries are escapes or not."""
    is_entry = codes != most
    entries = _before(is_entry)[::CHUNK_CODES]
    positions = _before(codes + is_entry)[::CHUNK_CODES]
    exceptions = _before(escapes)[entries]
    table = torch.stack((positions, entries, exceptions), 1)
    return as_bytes(table.to(torch.int32).reshape(-1))


def decode_block(
    block: Block, index: int, data: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode one block of a checked table: its places, and its bits.

    Raises:
        Malformed: the message names the row, and what is wrong with it.

    """
    places = decode_places(block, index, data)
    codes, bits = decode_values(block, index, data)
    if block.form in CODE_BYTES:
        escapes = torch.zeros_like(places).bool()
        if codes is not None:
            escapes = codes == (1 << 8 * block.code_bytes) - 1
        code_bytes = CODE_BYTES[block.form]
        gaps = _unsigned(_section(block, data, 1), code_bytes)
        wanted = _chunks(gaps, (1 << 8 * code_bytes) - 1, escapes)
        demand(
            bool((wanted == _section(block, data, 0)).all()),
            index,
            "the table of chunks does not fit the codes",
        )
    return places, bits


def decode_places(block: Block, index: int, data: torch.Tensor) -> torch.Tensor:
    """The places of a block, counted in the tensor."""
    section = _section(block, data, 1)
    size = block.num_elements
    if block.form == PlaceForm.WHOLE:
        inside = torch.arange(size, device=data.device)
    elif block.form == PlaceForm.BITMAP:
        shifts = torch.arange(8, device=data.device)
        bits = (section.to(torch.int64).unsqueeze(1) >> shifts) & 1
        inside = bits.reshape(-1).nonzero().squeeze(1)
    elif block.form == PlaceForm.RUNS:
        starts, lengths = _unsigned(section, 4).view(-1, 2).unbind(1)
        ends = starts + lengths
        demand(bool((lengths > 0).all()), index, "a run is empty")
        behind = bool((starts[1:] >= ends[:-1]).all())
        demand(behind, index, "a run is not behind the run before it")
        demand(int(ends[-1]) <= size, index, "a place is beyond the block")
        entry = _before(lengths)
        inside = torch.repeat_interleave(starts - entry, lengths)
        inside = inside + torch.arange(len(inside), device=data.device)
    else:
        code_bytes = CODE_BYTES[block.form]
        codes = _unsigned(section, code_bytes)
        is_entry = codes != (1 << 8 * code_bytes) - 1
        last = bool(is_entry[-1])
        demand(last, index, "the last code of the places is no place")
        inside = ((codes + is_entry).cumsum(0) - 1)[is_entry]
    demand(int(inside[-1:].sum()) < size, index, "a place is beyond the block")
    demand(len(inside) >= block.num_entries, index, "fewer places than entries")
    demand(len(inside) <= block.num_entries, index, "more places than entries")
    return inside + block.first


def decode_values(
    block: Block, index: int, data: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The codes of differences of a block, if it has any, and its bits."""
    section, integers = _section(block, data, 2), INTEGERS[block.width]
    if block.values == ValueForm.RAW:
        return None, section.clone().view(integers)
    codes = _unsigned(section, block.code_bytes)
    escapes = codes == (1 << 8 * block.code_bytes) - 1
    demand(
        int(escapes.sum()) == block.num_exceptions,
        index,
        "the codes of differences have another number of exceptions",
    )
    bits = ((codes >> 1) ^ -(codes & 1)).to(integers)
    bits[escapes] = _section(block, data, 3).clone().view(integers)
    return codes, bits


def demand(holds: bool, index: int, what: str) -> None:
    """Raise `Malformed` for that row unless something holds."""
    if not holds:
        raise Malformed(f"a part of the delta is malformed: row {index}: {what}")


def _section(block: Block, data: torch.Tensor, kind: int) -> torch.Tensor:
    at = (block.chunks_at, block.places_at, block.values_at, block.exceptions_at)[kind]
    return data[at : at + section_bytes(block)[kind]]


def _before(counts: torch.Tensor) -> torch.Tensor:
    """The sum before each element."""
    return counts.cumsum(0) - counts.to(torch.int64)


def _unsigned(section: torch.Tensor, code_bytes: int) -> torch.Tensor:
    """The unsigned numbers of a section, as int64."""
    numbers = section.clone().view(INTEGERS[code_bytes]).to(torch.int64)
    return numbers & ((1 << 8 * code_bytes) - 1)


def as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The bytes of flat numbers."""
    return numbers.contiguous().view(torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // 8) * 8
