"""Encoding on a GPU: a kernel finds what changed, and torch encodes it there."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm.inflight.delta import reference
from vllm.inflight.delta.part import (
    CHUNK_CODES,
    HEADER,
    MAX_ELEMENTS,
    Block,
    Part,
    block_elements,
)
from vllm.inflight.ops import INTEGERS

MOST_ENTRIES = 4 * MAX_ELEMENTS
"""Changes that are encoded at once: about 1.5 GB of GPU memory."""


class DeviceCoder:
    """Encodes tensors of one GPU into parts on that GPU."""

    blocks_at_once = 32

    def __init__(self, limit: int, values: int) -> None:
        self._limit, self._values = limit, values
        self._waiting: deque[reference.EncodedBlock] = deque()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a part of all blocks that wait; 0 without any."""
        return HEADER.size + self._num_bytes if self._waiting else 0

    def add(
        self, number: int, start: int, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode the changes between two flat tensors of integers from `start` on."""
        from vllm.inflight.delta.triton_kernels import find

        self._encode(number, *find(old, new, start))

    def add_places(
        self, number: int, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode changes with known places."""
        if int(places[0]) < 0:
            raise ValueError("a position is negative")
        if not bool((places[1:] > places[:-1]).all()):
            raise ValueError("positions must strictly increase")
        self._encode(number, places, old, new)

    def _encode(
        self, number: int, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        size = block_elements(self._limit, new.element_size())
        start = 0
        while start < len(places):
            end = start + MOST_ENTRIES
            if end < len(places):  # then at the border of a block
                border = places[end] // size * size
                end = int(torch.searchsorted(places, border))
            own = slice(start, end)
            blocks = encode_blocks(
                number, places[own], old[own], new[own], size, self._values
            )
            for block in blocks:
                self._waiting.append(block)
                self._num_bytes += block.num_bytes
            start = end

    def take(self, limit: int) -> Part:
        """The first blocks that wait and fit into `limit` bytes, as a part."""
        taken = [self._waiting.popleft()]
        size = HEADER.size + taken[0].num_bytes
        while self._waiting and size + self._waiting[0].num_bytes <= limit:
            taken.append(self._waiting.popleft())
            size += taken[-1].num_bytes
        self._num_bytes -= size - HEADER.size
        return reference.assemble(taken, taken[0].sections[0].device)


def encode_blocks(
    number: int,
    places: torch.Tensor,
    old_bits: torch.Tensor,
    new_bits: torch.Tensor,
    size: int,
    values: int,
) -> Iterator[reference.EncodedBlock]:
    """Encode changes as `reference.encode_block` does, all blocks of gaps at once.

    The host waits for the GPU a few times, not a few times for each block.

    Args:
        number: number of the tensor.
        places: numbers of the changed elements, at least one.
        old_bits: the elements before, as integers of their width.
        new_bits: the elements now.
        size: elements of a block.
        values: a `ValueForm`, or 0 for the smaller one.

    """
    entries = _Entries(places, old_bits, new_bits, size)
    blocks = entries.rows(number, values)
    gaps = {form: entries.gap_codes(form, blocks) for form in reference.CODE_BYTES}
    differences = {
        code_bytes: entries.difference_codes(code_bytes)
        for code_bytes in entries.escapes
        if any(row.code_bytes == code_bytes for row, _ in blocks)
    }
    for row, start in blocks:
        own = slice(start.entry, start.entry + row.num_entries)
        if row.form not in reference.CODE_BYTES:
            bits = old_bits[own], new_bits[own]
            yield reference.encode_block(number, places[own], *bits, values)
            continue
        codes, exceptions = new_bits[own], new_bits[:0]
        if row.code_bytes:
            all_codes, all_exceptions = differences[row.code_bytes]
            first = start.exception[row.code_bytes]
            codes = all_codes[own]
            exceptions = all_exceptions[first : first + row.num_exceptions]
        chunks, place_codes = gaps[row.form]
        code = start.code[reference.CODE_BYTES[row.form]]
        place_codes = place_codes[code : code + row.num_codes]
        chunk = start.chunk[reference.CODE_BYTES[row.form]]
        chunks = chunks[chunk : chunk + -(-row.num_codes // CHUNK_CODES)].reshape(-1)
        sections = chunks, place_codes, codes, exceptions
        one, two, three, four = map(reference.as_bytes, sections)
        yield reference.EncodedBlock(row, (one, two, three, four))


@dataclass
class _Start:
    """The first entry, code, chunk and exception of a block among those of all blocks.

    Codes, chunks and exceptions are counted as if every block had them, by the bytes
    of a code.
    """

    entry: int
    code: dict[int, int]
    chunk: dict[int, int]
    exception: dict[int, int]


Blocks = list[tuple[Block, _Start]]


class _Entries:
    """The changed elements of several blocks, and what the forms cost each block."""

    def __init__(
        self, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor, size: int
    ) -> None:
        self.width, num = new.element_size(), len(places)
        _, self.counts = (places // size).unique_consecutive(return_counts=True)
        self.ends = self.counts.cumsum(0)
        starts = self.ends - self.counts
        self.first, self.last = places[starts], places[self.ends - 1]
        self.inside = places - self.first.repeat_interleave(
            self.counts, output_size=num
        )
        before = torch.cat((self.inside[:1], self.inside[:-1]))
        before[starts] = -1
        self.gaps = self.inside - before - 1
        self.difference = new - old  # wraps
        self.zigzag = reference.zigzag_codes(self.difference)
        self.escapes = {
            code_bytes: reference.escapes_of(self.zigzag, code_bytes)
            for code_bytes in reference.code_widths(self.width)
        }

    def rows(self, number: int, values: int) -> Blocks:
        """The rows of all blocks, in the forms that cost the least."""
        columns = [self.first, self.last, self.counts, self._of_blocks(self.gaps > 0)]
        columns += [self._of_blocks(self.gaps // most) for most in (0xFF, 0xFFFF)]
        columns += [self._of_blocks(each) for each in self.escapes.values()]
        blocks: Blocks = []
        next_one = _Start(0, {1: 0, 2: 0}, {1: 0, 2: 0}, {1: 0, 2: 0})
        table: list[list[int]] = torch.stack(columns, 1).tolist()
        for first, last, count, later_runs, most8, most16, *escapes in table:
            codes, size = {1: count + most8, 2: count + most16}, last - first + 1
            form, code_bytes = reference.choose_values(
                self.width, count, escapes, values
            )
            place_form, num_codes = reference.choose_places(
                count, size, codes[1], codes[2], later_runs + 1
            )
            exceptions = escapes[code_bytes - 1] if code_bytes else 0
            row = Block(
                *(number, self.width, place_form, form, code_bytes, first, size),
                *(count, exceptions, num_codes, 0, 0, 0, 0),
            )
            blocks.append((row, copy.deepcopy(next_one)))
            next_one.entry += count
            for each in (1, 2):
                next_one.code[each] += codes[each]
                if reference.CODE_BYTES.get(place_form) == each:
                    next_one.chunk[each] += -(-num_codes // CHUNK_CODES)
            for each, num in enumerate(escapes, 1):
                next_one.exception[each] += num
        return blocks

    def _of_blocks(self, per_entry: torch.Tensor) -> torch.Tensor:
        """The sum of each block."""
        sums = per_entry.cumsum(0)[self.ends - 1]
        return sums.diff(prepend=sums.new_zeros(1))

    def difference_codes(self, code_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes of all differences, and the exceptions."""
        escapes = self.escapes[code_bytes]
        codes = self.zigzag.masked_fill(escapes, -1).to(INTEGERS[code_bytes])
        return codes, self.difference[escapes]

    def gap_codes(self, form: int, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunks of the blocks of this form, and the codes of all blocks.

        Of a chunk: position, entries, exceptions before it; int32.
        """
        code_bytes = reference.CODE_BYTES[form]
        most, integers = (1 << 8 * code_bytes) - 1, INTEGERS[code_bytes]
        states = [
            (start.code[code_bytes] + code, code, start.entry, row.code_bytes)
            for row, start in blocks
            if row.form == form
            for code in range(0, row.num_codes, CHUNK_CODES)
        ]
        if not states:
            return self.inside[:0], self.inside[:0]
        at = (self.gaps // most + 1).cumsum(0) - 1
        codes = torch.full((int(at[-1]) + 1,), -1, dtype=integers, device=at.device)
        codes[at] = (self.gaps % most).to(integers)
        table = torch.tensor(states, device="cpu").to(at.device)
        code, code_in_block, first_entry, value_bytes = table.t().contiguous()
        entries = torch.searchsorted(at, code)
        last = (entries - 1).clamp(min=0)
        # After the last place, every code is a maximal one.
        position = self.inside[last] + 1 + most * (code - at[last] - 1)
        begun = entries > first_entry
        position = torch.where(begun, position, most * code_in_block)
        exceptions = torch.zeros_like(position)
        for each, escapes in self.escapes.items():
            sums = torch.cat((entries.new_zeros(1), escapes.cumsum(0)))
            between = sums[entries] - sums[first_entry]
            exceptions = torch.where(value_bytes == each, between, exceptions)
        chunks = torch.stack((position, entries - first_entry, exceptions), 1)
        return chunks.to(torch.int32), codes
