"""The entries of a change log: the elements that one update has logged, and where.

Elements of one parameter whose memory was taken at once are a stretch: first the
offsets, then the bits. Stretches whose memory was taken at once lie one after the
other, in pieces. Pieces may be moved; a stretch is never cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight import ops

Numbers = NDArray[np.int64]

ALIGNMENT = 8
"""Bytes at whose multiples offsets and bits begin."""


class Logged(NamedTuple):
    """Elements of one parameter in the log.

    Attributes:
        param: name of the parameter.
        width: bytes of an element.
        offsets: places in the memory of the parameter, int32; -1 for an element that is
            served on another rank.
        bits: what the places get, or had before; integers of that width.
        first: number of the first of these elements in the log.

    """

    param: str
    width: int
    offsets: torch.Tensor
    bits: torch.Tensor
    first: int


class Pieces(NamedTuple):
    """Stretches whose memory was taken at once.

    Attributes:
        params: the parameter of each.
        rows: int64 [stretches, 5], as in `LogEntries.table`.
        memory: uint8, in which they lie one after the other.

    """

    params: tuple[str, ...]
    rows: Numbers
    memory: torch.Tensor

    def stretches(self) -> Iterator[Logged]:
        """Each of them, as tensors in that memory."""
        base = self.memory.data_ptr()
        for param, row in zip(self.params, self.rows.tolist(), strict=True):
            offsets_at, bits_at, num, first, width = row
            offsets = self.memory[offsets_at - base :][: 4 * num].view(torch.int32)
            bits = self.memory[bits_at - base :][: width * num]
            yield Logged(param, width, offsets, bits.view(ops.INTEGERS[width]), first)

    @property
    def ends(self) -> Numbers:
        """Where each of them ends in that memory."""
        return np.cumsum(sizes_of(self.rows[:, 2], self.rows[:, 4]))

    def part(self, first: int, end: int) -> Pieces:
        """The stretches from number `first` to `end`."""
        starts = [0, *self.ends.tolist()]
        memory = self.memory[starts[first] : starts[end]]
        return Pieces(self.params[first:end], self.rows[first:end], memory)

    def at(self, memory: torch.Tensor) -> Pieces:
        """The same stretches in other memory, to which they were copied."""
        rows = self.rows.copy()
        rows[:, :2] += memory.data_ptr() - self.memory.data_ptr()
        return Pieces(self.params, rows, memory)


class LogEntries(NamedTuple):
    """What one update has logged, and where it lies."""

    pieces: tuple[Pieces, ...] = ()

    @property
    def stretches(self) -> list[Logged]:
        """The elements, one entry for each stretch of a parameter."""
        return [logged for pieces in self.pieces for logged in pieces.stretches()]

    @property
    def memory(self) -> list[torch.Tensor]:
        """Where the elements lie; uint8."""
        return [pieces.memory for pieces in self.pieces]

    @property
    def params(self) -> set[str]:
        """The parameters that have elements here."""
        return {param for pieces in self.pieces for param in pieces.params}

    def table(self, columns: int) -> tuple[list[str], Numbers]:
        """The stretches as rows of numbers, for kernels.

        Args:
            columns: of the table, at least 5.

        Returns:
            the parameter of each row; and int64 [stretches, columns]: addresses of
            offsets and bits, number of elements, number of the first one in the log,
            bytes of an element, and zeros.

        """
        params = [param for pieces in self.pieces for param in pieces.params]
        rows = np.zeros((len(params), columns), dtype=np.int64)
        if params:
            rows[:, :5] = np.concatenate([pieces.rows for pieces in self.pieces])
        return params, rows


def sizes_of(counts: Numbers, widths: Numbers) -> Numbers:
    """Bytes that each stretch takes.

    Args:
        counts: the elements of each.
        widths: bytes of one of them.

    """
    return aligned(4 * counts) + aligned(widths * counts)


def aligned(num_bytes: Numbers) -> Numbers:
    """The next multiples of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
