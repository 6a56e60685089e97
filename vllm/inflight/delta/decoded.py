"""What a part is decoded to: the changed elements of each tensor, and their bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight.delta.part import Rows, ValueForm
from vllm.inflight.ops import INTEGERS

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Changes:
    """Changed elements of one tensor.

    Attributes:
        number: number of the tensor in the delta's list of names.
        places: numbers of the elements in the tensor, strictly increasing; int64, or
            int32 if it was asked for.
        bits: their new bits, or what to add to the old ones; an integer of their width.
        are_differences: whether `bits` has to be added.

    """

    number: int
    places: torch.Tensor
    bits: torch.Tensor
    are_differences: bool

    def new_bits(self, old_bits: torch.Tensor) -> torch.Tensor:
        """The new bits of the changed elements, given their old ones."""
        return old_bits + self.bits if self.are_differences else self.bits


class Groups:
    """The groups of one part, or of several: each is a range of changes of one tensor.

    A tensor has two groups in a row where the form of its values changes.

    Args:
        rows: of the parts, one after the other.

    Attributes:
        numbers: of each group, the number of its tensor.
        widths: of each group, the bytes of an element.
        are_differences: of each group, whether the bits have to be added to the old
            ones.
        counts: of each group, the changed elements.
        of_rows: of each row, the index of its group.
        within: of each row, how many places and how many bytes of bits come before it
            in its group; int64 [rows, 2].

    """

    def __init__(self, rows: Rows) -> None:
        entries = rows["num_entries"].astype(np.int64)
        kinds = np.stack((rows["number"], rows["values"]))
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = (kinds[:, 1:] != kinds[:, :-1]).any(0)
        firsts = np.flatnonzero(is_first)
        self.numbers = rows["number"][firsts].astype(np.int64)
        self.widths = rows["width"][firsts].astype(np.int64)
        self.are_differences = rows["values"][firsts] == ValueForm.DIFFERENCE
        self.counts = np.add.reduceat(entries, firsts) if len(firsts) else entries
        self.of_rows = np.cumsum(is_first) - 1
        sums = before(np.stack((entries, entries * rows["width"]), 1))
        self.within = sums - sums[firsts][self.of_rows]

    def __len__(self) -> int:
        return len(self.numbers)


class DecodedPart:
    """All changes of one part, or of several. Iterating yields them as `Changes`.

    Args:
        groups: of the parts.
        device: where the changes are decoded.
        place_dtype: of the places. `torch.int32` is for tensors of less than 2**31
            elements, and on a GPU alone.
        given: of each group, the addresses of memory for its places and for its bits,
            0 where there is none; int64 [groups, 2]. By default there is none.

    Raises:
        torch.OutOfMemoryError: there is no memory for the rest.

    Attributes:
        groups: of the parts.
        places: of all groups without memory for them that was given.
        bits: likewise; uint8.
        addresses: of each group, where its places and its bits are; int64 [groups, 2].
        fault: on a GPU, what `require_sound` reads; None: the data is not malformed.

    """

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        place_dtype: torch.dtype = torch.int64,
        given: Numbers | None = None,
    ) -> None:
        self.groups = groups
        if given is None:
            given = np.zeros((len(groups), 2), dtype=np.int64)
        is_own = given == 0
        counts, sizes = groups.counts, -(-groups.counts * groups.widths // 8) * 8
        room = np.where(is_own, np.stack((counts, sizes), 1), 0)
        self._firsts = before(room)
        num_places, num_bytes = room.sum(0).tolist()
        self.places = torch.empty(num_places, dtype=place_dtype, device=device)
        self.bits = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._units = np.array([place_dtype.itemsize, 1])
        starts = self.places.data_ptr(), self.bits.data_ptr()
        own = np.array(starts, dtype=np.int64) + self._firsts * self._units
        self.addresses = np.where(is_own, own, given)
        self.fault: torch.Tensor | None = None

    @property
    def slots(self) -> Numbers:
        """Of each row its first place in `places`, and its first byte in `bits`."""
        return self._firsts[self.groups.of_rows] + self.groups.within

    @property
    def row_addresses(self) -> Numbers:
        """Of each row, where its places and its bits are; int64 [rows, 2]."""
        return self.addresses[self.groups.of_rows] + self.groups.within * self._units

    def changes_of(self, group: int) -> Changes:
        """The changes of a group; no memory for them was given."""
        groups = self.groups
        num, width = int(groups.counts[group]), int(groups.widths[group])
        place, byte = self._firsts[group].tolist()
        return Changes(
            int(groups.numbers[group]),
            self.places[place : place + num],
            self.bits[byte : byte + num * width].view(INTEGERS[width]),
            bool(groups.are_differences[group]),
        )

    def __iter__(self) -> Iterator[Changes]:
        return map(self.changes_of, range(len(self.groups)))


def before(counts: Numbers) -> Numbers:
    """The sum before each number; of two dimensions, in each column."""
    return np.cumsum(counts, axis=0) - counts
