"""Encoding on a GPU: kernels find what changed, and write the sections.

The work is done for many tensors at once: the host waits for the GPU once for the
number of changes of all blocks, and once for each batch of blocks, to choose their
forms. The bytes are those of the host's encoder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm.inflight.delta.decoded import Numbers, before
from vllm.inflight.delta.part import (
    CHUNK_CODES,
    HEADER,
    MAGIC,
    MAX_ELEMENTS,
    OFFSETS,
    ROW,
    ROWS,
    VERSION,
    Part,
    PlaceForm,
    Rows,
    ValueForm,
    block_elements,
)
from vllm.inflight.delta.reference import CHUNK_BYTES
from vllm.inflight.errors import Conflict
from vllm.inflight.ops.arriving import Arriving, to_host
from vllm.inflight.ops.launch_tables import LaunchTable, to_device

MOST_ENTRIES = 8 * MAX_ELEMENTS
"""Changes that are encoded at once: about 0.7 GB of GPU memory."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor before and now: flat, of integers."""


class Compared(NamedTuple):
    """A tensor, or the rest of one from element `start` on, before and now."""

    number: int
    start: int
    old: torch.Tensor
    new: torch.Tensor


@dataclass
class _Encoded:
    """Blocks of one batch that wait for their part."""

    rows: Rows
    """Their offsets are set in the part."""
    sizes: Numbers
    """[blocks, 4]: bytes of each section, with its padding."""
    data: torch.Tensor
    """All sections: first the chunks of all blocks, then the places, and so on."""
    firsts: Numbers
    """[blocks, 4]: offset of each section in `data`."""

    @property
    def num_bytes(self) -> Numbers:
        """Of each block, its bytes in a part."""
        return ROW.size + self.sizes.sum(1)

    def split(self, num: int) -> tuple[_Encoded, _Encoded]:
        """The first `num` blocks, and the others."""
        return (
            _Encoded(self.rows[:num], self.sizes[:num], self.data, self.firsts[:num]),
            _Encoded(self.rows[num:], self.sizes[num:], self.data, self.firsts[num:]),
        )

    def section(self, kind: int) -> torch.Tensor:
        """The sections of one kind, one after another."""
        first = int(self.firsts[0, kind])
        return self.data[first : first + int(self.sizes[:, kind].sum())]


class DeviceCoder:
    """Encodes tensors of one GPU into parts on that GPU."""

    blocks_at_once = 4096

    def __init__(self, limit: int, values: int) -> None:
        self._limit, self._values = limit, values
        self._waiting: deque[_Encoded] = deque()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a part of all blocks that wait; 0 without any."""
        return HEADER.size + self._num_bytes if self._waiting else 0

    def add(
        self, number: int, start: int, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode the changes between two flat tensors of integers from `start` on."""
        found = DeviceSearch([Compared(number, start, old, new)], self._limit)
        found.wait()
        for _ in self._encode(found):
            pass

    def add_found(
        self, first: int, found: DeviceSearch
    ) -> tuple[list[bool], Iterator[None]]:
        """Encode the changes that a search finds; see `Encoder.add_found`."""
        found.wait()
        found.number_from(first)
        return found.has_changed.tolist(), self._encode(found)

    def add_places(
        self, number: int, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode changes with known places."""
        if int(places[0]) < 0:
            raise ValueError("a position is negative")
        if not bool((places[1:] > places[:-1]).all()):
            raise ValueError("positions must strictly increase")
        width = new.element_size()
        size = block_elements(self._limit, width)
        block, counts = (places // size).unique_consecutive(return_counts=True)
        blocks = _Blocks(
            np.full(len(block), number),
            np.full(len(block), width),
            to_host(block).numpy() * size,
            to_host(counts).numpy(),
        )
        # What is subtracted wraps in its own width, like everywhere.
        entries = _Entries(
            (places % size).to(torch.int32),
            new.to(torch.int64),
            (new - old).to(torch.int64),
        )
        for first, end in blocks.batches():
            few = blocks.part(first, end)
            start = int(blocks.counts[:first].sum())
            own = entries.part(start, start + int(few.counts.sum()))
            self._keep(_encoded(few, own, self._values, torch.zeros_like(places[:1])))

    def _encode(self, found: DeviceSearch) -> Iterator[None]:
        """Encode what a search has found, a batch at each step."""
        for first, end in found.blocks.batches():
            blocks = found.blocks.part(first, end)
            entries, torn = found.entries(first, end)
            self._keep(_encoded(blocks, entries, self._values, torn))
            yield

    def _keep(self, encoded: _Encoded) -> None:
        self._waiting.append(encoded)
        self._num_bytes += int(encoded.num_bytes.sum())

    def take(self, limit: int) -> Part:
        """The first blocks that wait and fit into `limit` bytes, as a part."""
        taken: list[_Encoded] = []
        size, is_full = HEADER.size, False
        while self._waiting and not is_full:
            batch = self._waiting.popleft()
            ends = size + np.cumsum(batch.num_bytes)
            num = int(np.searchsorted(ends, limit, side="right"))
            num = max(num, 0 if taken else 1)
            is_full = num < len(batch.rows)
            if num:
                first, batch = batch.split(num)
                taken.append(first)
                size = int(ends[num - 1])
            if is_full:
                self._waiting.appendleft(batch)
        self._num_bytes -= size - HEADER.size
        return _assembled(taken)


class _Blocks(NamedTuple):
    """Blocks with a change: a number for each in every column."""

    numbers: Numbers
    widths: Numbers
    starts: Numbers
    """The element of the tensor from which places are counted."""
    counts: Numbers
    """Changed elements."""

    def part(self, first: int, end: int) -> _Blocks:
        """The blocks from `first` to `end`."""
        return _Blocks(*(column[first:end] for column in self))

    def batches(self) -> Iterator[tuple[int, int]]:
        """Ranges of blocks of at most `MOST_ENTRIES` changes, of one block at least."""
        first, ends = 0, np.cumsum(self.counts)
        while first < len(ends):
            done = int(ends[first - 1]) if first else 0
            end = int(np.searchsorted(ends, done + MOST_ENTRIES, side="right"))
            end = max(end, first + 1)
            yield first, end
            first = end


class _Entries(NamedTuple):
    """Changed elements of a batch of blocks, on the GPU."""

    places: torch.Tensor
    """Counted from the start of the block; int32."""
    new: torch.Tensor
    """The new bits, as int64."""
    differences: torch.Tensor
    """New minus old bits, in the element's width; as int64."""

    def part(self, first: int, end: int) -> _Entries:
        """The entries from `first` to `end`."""
        return _Entries(*(column[first:end] for column in self))


class DeviceSearch:
    """Counts the changes of all blocks of some tensors, then brings them.

    The GPU counts while the host does something else, until it calls `wait`. The
    tensors must not change before their changes are encoded. If one does all the same,
    nothing is written beyond the memory of the changes, and `_encoded` raises. A block
    has a whole number of programs.

    Args:
        stretches: of tensors of one device.
        limit: bytes of a part.

    """

    def __init__(self, stretches: Sequence[Compared], limit: int) -> None:
        from vllm.inflight.delta import triton_kernels as kernels

        columns = [
            (s.number, s.start, s.old.numel(), s.old.element_size()) for s in stretches
        ]
        numbers, starts, sizes, widths = np.array(columns, dtype=np.int64).T
        self._device = stretches[0].old.device
        self._stretches = stretches  # their memory has to stay
        of_width = {w: block_elements(limit, w) for w in np.unique(widths).tolist()}
        per_block = np.array([of_width[width] for width in widths.tolist()])
        per_program = kernels.BYTES_PER_PROGRAM // widths
        num_programs = -(-sizes // per_program)
        num_blocks = -(-sizes // per_block)
        rows = np.zeros((len(stretches), kernels.SEARCH_COLUMNS), dtype=np.int64)
        rows[:, :2] = [(s.old.data_ptr(), s.new.data_ptr()) for s in stretches]
        rows[:, 2], rows[:, 4], rows[:, 5] = sizes, widths, per_block - 1
        self._is_aligned = not (rows[:, :2] % 16).any()
        self._widths = np.unique(widths[sizes > 0]).tolist()
        self.has_changed = np.zeros(len(stretches), dtype=bool)
        """Of each tensor, whether an element of it has changed."""
        self._owner = np.repeat(np.arange(len(stretches)), num_blocks)
        within = np.arange(len(self._owner)) - before(num_blocks)[self._owner]
        self.blocks = _Blocks(
            numbers[self._owner],
            widths[self._owner],
            starts[self._owner] + within * per_block[self._owner],
            np.zeros(len(self._owner), dtype=np.int64),
        )
        if not len(self._owner):
            return
        self._rows, self._owners = LaunchTable.of(rows, 3, num_programs, self._device)
        last = np.minimum(
            (within + 1) * (per_block // per_program)[self._owner],
            num_programs[self._owner],
        )
        # The programs of each block end here.
        self._ends = before(num_programs)[self._owner] + last
        self._found = found = kernels.Differing.room(len(self._owners), self._device)
        for width in self._widths:
            kernels.count(
                self._rows, self._owners, found, width, is_aligned=self._is_aligned
            )
        sums = found.counts.cumsum(0)
        self._firsts = sums - found.counts
        self._entries = Arriving(sums[to_device(self._ends - 1, self._device)])

    def wait(self) -> None:
        """Wait for the numbers of changes."""
        if not len(self._owner):
            return
        entries, ends = self._entries.tensor().numpy(), self._ends
        is_changed = np.diff(entries, prepend=0) > 0
        self._programs = np.stack((np.concatenate(([0], ends[:-1])), ends), 1)[
            is_changed
        ]
        self.blocks = _Blocks(*(column[is_changed] for column in self.blocks))._replace(
            counts=np.diff(entries, prepend=0)[is_changed]
        )
        self._owner = self._owner[is_changed]
        self.has_changed[self._owner] = True

    def number_from(self, first: int) -> None:
        """Number the tensors that have changed from `first` on."""
        numbers = first + np.cumsum(self.has_changed) - 1
        self.blocks = self.blocks._replace(numbers=numbers[self._owner])

    def entries(self, first: int, end: int) -> tuple[_Entries, torch.Tensor]:
        """The changes of the blocks from `first` to `end`.

        Also an int64 [1], which is not zero if others are there than were counted.
        """
        from vllm.inflight.delta import triton_kernels as kernels

        num = int(self.blocks.counts[first:end].sum())
        place, *bits = (
            torch.empty(num, dtype=dtype, device=self._device)
            for dtype in (torch.int32, torch.int64, torch.int64)
        )
        programs = int(self._programs[first, 0]), int(self._programs[end - 1, 1])
        entries = _Entries(place, *bits)
        torn = torch.zeros(1, dtype=torch.int64, device=self._device)
        for width in self._widths:
            kernels.compact(
                *(self._rows, self._owners, self._found, self._firsts),
                *(programs, entries, torn, width),
                is_aligned=self._is_aligned,
            )
        return entries, torn


def _encoded(
    blocks: _Blocks, entries: _Entries, values: int, torn: torch.Tensor
) -> _Encoded:
    """The blocks of one batch, encoded.

    Args:
        blocks: of the batch.
        entries: of these blocks.
        values: a `ValueForm`, or 0.
        torn: of `DeviceSearch.entries`.

    Raises:
        Conflict: other elements differ than were counted.

    """
    from vllm.inflight.delta import triton_kernels as kernels

    device = entries.places.device
    table = np.zeros((len(blocks.counts), kernels.ENCODE_COLUMNS), dtype=np.int64)
    starts = table[:, 0] = before(blocks.counts)
    table[:, 1], table[:, 3] = blocks.counts, blocks.widths
    num_programs = -(-blocks.counts // kernels.ENTRIES_PER_STEP)
    on_device, owners = LaunchTable.of(table, 2, num_programs, device)
    # A row for each measure: torch sums up columns many times slower.
    sums = torch.empty(kernels.MEASURES, len(owners), dtype=torch.int64, device=device)
    kernels.measure(on_device, owners, entries, sums)
    sums = sums.cumsum(1)
    ends = np.cumsum(num_programs) - 1
    borders = to_device(np.stack((ends, starts, starts + blocks.counts - 1)), device)
    # `torn` comes with the numbers that the host waits for.
    columns = [
        sums[:, borders[0]],
        entries.places[borders[1:]].to(torch.int64),
        torn.expand(1, len(blocks.counts)),
    ]
    *found, first, last, are_torn = to_host(torch.cat(columns)).numpy()
    if are_torn.any():
        raise Conflict(
            "the weights changed while they were compared with the last version",
            remedy="Let no training step run until the update has been sent.",
        )
    measures = np.diff(np.stack(found, 1), axis=0, prepend=0)

    rows = np.zeros(len(blocks.counts), dtype=ROWS)
    rows["number"], rows["width"] = blocks.numbers, blocks.widths
    rows["first"], rows["num_elements"] = blocks.starts + first, last - first + 1
    rows["num_entries"] = blocks.counts
    _choose_values(rows, measures[:, 3:], values)
    _choose_places(rows, measures[:, :3])
    sizes = -(-_section_bytes(rows) // 8) * 8
    firsts = before(sizes.T.reshape(-1)).reshape(4, -1).T
    data = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=device)
    table[:, 4], table[:, 5] = rows["form"], rows["code_bytes"]
    table[:, 6], table[:, 8:12] = first, firsts
    most_bytes = int(blocks.widths.max())
    kernels.encode(to_device(table, device), owners, entries, sums, data, most_bytes)
    return _Encoded(rows, sizes, data, firsts)


def _choose_values(rows: Rows, escapes: Numbers, values: int) -> None:
    """Set the form of the values of each row; of equal ones, the first.

    Args:
        rows: get it.
        escapes: [rows, 2]: differences that have no code of 1 byte, of 2 bytes.
        values: a `ValueForm`, or 0 for the smaller one.

    """
    num, width = (rows[name].astype(np.int64) for name in ("num_entries", "width"))
    never = np.iinfo(np.int64).max
    sizes = np.stack(
        (
            num * width,
            num + escapes[:, 0] * width,
            np.where(width >= 4, 2 * num + escapes[:, 1] * width, never),
        )
    )
    if values == ValueForm.DIFFERENCE:
        sizes[0] = never
    elif values == ValueForm.RAW:
        sizes[1:] = never
    code_bytes = sizes.argmin(0)
    has_codes = code_bytes > 0
    rows["values"] = np.where(has_codes, ValueForm.DIFFERENCE, ValueForm.RAW)
    rows["code_bytes"] = code_bytes
    chosen = escapes[np.arange(len(rows)), np.maximum(code_bytes - 1, 0)]
    rows["num_exceptions"] = np.where(has_codes, chosen, 0)


def _choose_places(rows: Rows, measures: Numbers) -> None:
    """Set the form of the places of each row; of equal ones, the first.

    Args:
        rows: get it.
        measures: [rows, 3]: runs but the first, codes that are no places in `gaps8`
            and in `gaps16`.

    """
    num = rows["num_entries"].astype(np.int64)
    later_runs, most8, most16 = measures.T
    codes = np.stack((num + most8, num + most16, np.zeros_like(num), 1 + later_runs))
    forms = np.arange(PlaceForm.GAPS8, PlaceForm.WHOLE)
    each = np.repeat(rows[None], len(forms), 0)
    each["form"], each["num_codes"] = forms[:, None], codes
    sizes = _section_bytes(each.reshape(-1))[:, :2].sum(1).reshape(codes.shape)
    chosen = sizes.argmin(0)
    is_whole = num == rows["num_elements"]
    rows["form"] = np.where(is_whole, PlaceForm.WHOLE, forms[chosen])
    rows["num_codes"] = np.where(is_whole, 0, codes[chosen, np.arange(len(rows))])


def _section_bytes(rows: Rows) -> Numbers:
    """[rows, 4]: bytes of each section, as of `reference.section_bytes`."""
    names = "form", "num_elements", "num_codes", "num_entries", "num_exceptions"
    form, size, codes, num, exceptions = (rows[n].astype(np.int64) for n in names)
    width = rows["width"].astype(np.int64)
    gap_bytes = np.where(form <= PlaceForm.GAPS16, form, 0)
    chunks = CHUNK_BYTES * np.where(gap_bytes > 0, -(-codes // CHUNK_CODES), 0)
    places = gap_bytes * codes
    places = np.where(form == PlaceForm.BITMAP, -(-size // 8), places)
    places = np.where(form == PlaceForm.RUNS, 8 * codes, places)
    value = np.where(rows["values"] == ValueForm.RAW, width, rows["code_bytes"])
    return np.stack((chunks, places, value * num, width * exceptions), 1)


def _assembled(taken: Sequence[_Encoded]) -> Part:
    """A part of these blocks."""
    rows = np.concatenate([batch.rows for batch in taken])
    sizes = np.concatenate([batch.sizes for batch in taken])
    offsets = before(sizes.T.reshape(-1)).reshape(4, -1)
    for name, column in zip(OFFSETS, offsets, strict=True):
        rows[name] = column
    size = int(sizes.sum())
    header = HEADER.pack(MAGIC, VERSION, 0, len(rows), 0, size, size)
    data = torch.cat([batch.section(kind) for kind in range(4) for batch in taken])
    table = torch.frombuffer(bytearray(header + rows.tobytes()), dtype=torch.uint8)
    return Part(table.to(data.device), data)
