"""A part of a delta: a table of blocks, and the data that the table describes.

docs/delta-format.md defines both. A part is self-contained: it can be decoded without
the other parts of its delta, and in any order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight.delta import compression
from vllm.inflight.errors import Malformed
from vllm.inflight.ops import native_core
from vllm.inflight.ops.arriving import to_host

MAGIC, VERSION, ZSTD = b"vifdelta", 1, 1
HEADER = struct.Struct("<8sIIIIQQ")
"""Magic, version, flags, number of rows, 0, bytes of `data` when it is plain, bytes of
`data` as it is."""
ROW = struct.Struct("<IBBBBQIIIIQQQQ")
"""The fields of `Block`, in their order."""

ROWS = np.dtype(
    [
        *(("number", "<u4"), ("width", "u1"), ("form", "u1"), ("values", "u1")),
        *(("code_bytes", "u1"), ("first", "<u8"), ("num_elements", "<u4")),
        *(("num_entries", "<u4"), ("num_exceptions", "<u4"), ("num_codes", "<u4")),
        *(("chunks_at", "<u8"), ("places_at", "<u8"), ("values_at", "<u8")),
        ("exceptions_at", "<u8"),
    ]
)
"""The same row in an array of numpy, which needs no step of Python for each row."""

OFFSETS = "chunks_at", "places_at", "values_at", "exceptions_at"
"""The fields of a row that are offsets in `data`."""

Rows = NDArray[np.void]
"""Rows of a table, as `ROWS`."""

MAX_ELEMENTS = 1 << 22
"""Most elements of a block."""
CHUNK_CODES = 1024
"""Codes of a chunk."""


class PlaceForm(IntEnum):
    """How a block says which of its elements changed."""

    GAPS8 = 1
    GAPS16 = 2
    BITMAP = 3
    RUNS = 4
    WHOLE = 5


class ValueForm(IntEnum):
    """How a block says what its changed elements became."""

    RAW = 1
    DIFFERENCE = 2


@dataclass(frozen=True, slots=True)
class Block:
    """A row of the table: the changes within a range of one tensor.

    Attributes:
        number: number of the tensor in the delta's list of names.
        width: bytes of an element.
        form: form of the places.
        values: form of the values.
        code_bytes: bytes of a code of differences; 0 for raw values.
        first: number of the block's first element in the tensor.
        num_elements: elements of the block.
        num_entries: changed elements.
        num_exceptions: differences that have no code.
        num_codes: codes of the places, or runs; else 0.
        chunks_at: offset in `data` of the table of chunks.
        places_at: offset in `data` of the places.
        values_at: offset in `data` of the values.
        exceptions_at: offset in `data` of the exceptions.

    """

    number: int
    width: int
    form: int
    values: int
    code_bytes: int
    first: int
    num_elements: int
    num_entries: int
    num_exceptions: int
    num_codes: int
    chunks_at: int
    places_at: int
    values_at: int
    exceptions_at: int


NOT_CHECKED = "check the part before its use: part.check(...)"


class Part:
    """A part as it travels: two flat uint8 tensors.

    Args:
        table: the table, on any device.
        data: the data, on any device; the part is decoded there.

    Raises:
        Malformed: one of them is no flat uint8 tensor.

    """

    def __init__(self, table: torch.Tensor, data: torch.Tensor) -> None:
        for name, tensor in (("table", table), ("data", data)):
            if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
                raise Malformed(f"the {name} of a part of a delta is no flat uint8")
        self.table, self.data = table.contiguous(), data.contiguous()
        self._checked: torch.Tensor | None = None
        self._rows: Rows | None = None
        self._on_host: torch.Tensor | None = None
        """A copy of the table for the next check, which nobody else can change."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the part, as it travels."""
        return self.table.numel() + self.data.numel()

    def on(self, device: torch.device) -> Part:
        """The part with its data on a device, where it is decoded."""
        if self.data.device == device:
            return self
        moved = Part(self.table, self.data.to(device))
        moved._on_host = self._on_host
        return moved

    def check(self, num_elements: Sequence[int], widths: Sequence[int]) -> None:
        """Check the table; `decode` checks the data that it describes.

        Args:
            num_elements: elements of each tensor in the delta's list of names; arrays
                of u64 need not be converted.
            widths: bytes of an element of each tensor; likewise arrays of u8.

        Raises:
            Malformed: the message names the row, and what is wrong with it.

        """
        bring_tables([self])
        table, self._on_host = self._on_host, None
        assert table is not None
        counts = _as_array("Q", num_elements)
        kinds = _as_array("B", widths)
        if len(counts) != len(kinds):
            raise ValueError("every tensor needs a number of elements and a width")
        places = (array_address(counts), array_address(kinds), len(counts))
        size, stored = table.numel(), self.data.numel()
        try:
            native_core().delta_check(table.data_ptr(), size, stored, *places)
        except ValueError as error:
            raise Malformed(f"a part of the delta is malformed: {error}") from None
        self._checked = table
        self._rows = table.numpy()[HEADER.size :].view(ROWS)

    @property
    def checked_table(self) -> torch.Tensor:
        """The table as it was checked, on the host."""
        if self._checked is None:
            raise ValueError(NOT_CHECKED)
        return self._checked

    def blocks(self) -> list[Block]:
        """The rows of the table, which was checked, one by one."""
        rows = self.checked_table.numpy().data[HEADER.size :]
        return [Block(*row) for row in ROW.iter_unpack(rows)]

    @property
    def rows(self) -> Rows:
        """The rows of the table, which was checked."""
        if self._rows is None:
            raise ValueError(NOT_CHECKED)
        return self._rows

    @property
    def plain_bytes(self) -> int | None:
        """Bytes of the data without its compression; None if it has none."""
        header = self.checked_table[: HEADER.size].numpy().tobytes()
        _, _, flags, _, _, plain_bytes, _ = HEADER.unpack(header)
        return plain_bytes if flags & ZSTD else None

    def plain_data(self) -> torch.Tensor:
        """The data, without its compression."""
        if (plain_bytes := self.plain_bytes) is None:
            return self.data
        plain = compression.decompress(self.data.cpu(), plain_bytes)
        return plain.to(self.data.device)


def bring_tables(parts: Sequence[Part]) -> None:
    """Copy the tables of these parts to the host, where they are checked next.

    Tables of one GPU come in one copy, so the host waits once.
    """
    missing: dict[torch.device, list[Part]] = {}
    for part in parts:
        if part._on_host is None:
            missing.setdefault(part.table.device, []).append(part)
    for some in missing.values():
        tables = to_host(torch.cat([part.table for part in some]))
        sizes = [part.table.numel() for part in some]
        for part, table in zip(some, tables.split(sizes), strict=True):
            part._on_host = table


def block_elements(limit: int, width: int) -> int:
    """Elements of a block: as many as fit into half a part, whatever changed."""
    return min(MAX_ELEMENTS, 1 << (limit // (2 * width)).bit_length() - 1)


def _as_array(kind: str, numbers: Sequence[int]) -> array[int]:
    """The numbers as an array of this type."""
    is_one = isinstance(numbers, array) and numbers.typecode == kind
    return numbers if is_one else array(kind, numbers)  # type: ignore[return-value]


def array_address(values: array[int]) -> int:
    """Address of the first value."""
    return values.buffer_info()[0]
