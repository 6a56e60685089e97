"""Decoding a part: the changed elements of each tensor, and their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight.delta.part import Part, Rows, ValueForm
from vllm.inflight.errors import Malformed
from vllm.inflight.ops import INTEGERS, native_core

if TYPE_CHECKING:
    from vllm.inflight.delta.device_decode import Launches

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class Changes:
    """Changed elements of one tensor.

    Attributes:
        number: number of the tensor in the delta's list of names.
        places: numbers of the elements in the tensor, strictly increasing; int64.
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


class DecodedPart:
    """All changes of one part, or of several: its groups, in two flat tensors.

    A group is a range of changes of one tensor. Iterating yields them as `Changes`.

    Attributes:
        numbers: of each group, the number of its tensor.
        widths: of each group, the bytes of an element.
        are_differences: of each group, whether the bits have to be added to the old
            ones.
        counts: of each group, the changed elements.
        first_places: of each group, the number of its first element in `places`.
        first_bytes: of each group, the offset of its bits in `bits`; a multiple of 8.
        places: of all groups; int64.
        bits: of all groups; uint8.

    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        """Make room for the changes of these rows.

        Raises:
            torch.OutOfMemoryError: there is none.

        """
        entries = rows["num_entries"].astype(np.int64)
        octets = entries * rows["width"]
        kinds = np.stack((rows["number"], rows["values"]))
        is_first = np.ones(len(rows), dtype=bool)
        is_first[1:] = (kinds[:, 1:] != kinds[:, :-1]).any(0)
        firsts = np.flatnonzero(is_first)
        self.numbers = rows["number"][firsts].astype(np.int64)
        self.widths = rows["width"][firsts].astype(np.int64)
        self.are_differences = rows["values"][firsts] == ValueForm.DIFFERENCE
        self.counts = _sums(entries, firsts)
        self.first_places = before(self.counts)
        sizes = -(-_sums(octets, firsts) // 8) * 8
        self.first_bytes = before(sizes)
        group = np.cumsum(is_first) - 1
        padding = self.first_bytes - before(octets)[firsts]
        self.slots = np.stack((before(entries), before(octets) + padding[group]), 1)
        """Of each row its first place in `places`, and its first byte in `bits`."""
        num_places, num_bytes = int(entries.sum()), int(sizes.sum())
        self.places = torch.empty(num_places, dtype=torch.int64, device=device)
        self.bits = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.fault: torch.Tensor | None = None
        """On a GPU, what `require_sound` reads; None: the data is not malformed."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Changes]:
        columns = (self.numbers, self.widths, self.are_differences, self.counts)
        slots = self.first_places, self.first_bytes
        for number, width, is_difference, num, place, byte in zip(
            *(column.tolist() for column in (*columns, *slots)), strict=True
        ):
            bits = self.bits[byte : byte + num * width].view(INTEGERS[width])
            places = self.places[place : place + num]
            yield Changes(number, places, bits, is_difference)


def decode(part: Part, *, num_threads: int = 1) -> DecodedPart:
    """Decode all of a part.

    A tensor has two groups in a row, the second with later places, where the form of
    its values changes.

    Args:
        part: a part that was checked. It is decoded on the device of its data.
        num_threads: threads that share the blocks on the host.

    Raises:
        Malformed: the message names the row, and what is wrong with it.

    """
    decoded = decode_unproved(part, num_threads=num_threads)
    require_sound([decoded.fault])
    return decoded


def decode_unproved(
    part: Part, *, num_threads: int = 1, launches: Launches | None = None
) -> DecodedPart:
    """Decode all of a part; on a GPU, do not wait for it.

    If the data is malformed, a place may be any number, until `require_sound` tells.

    Args:
        part: as in `decode`.
        num_threads: as in `decode`.
        launches: if given, the part is decoded by kernels, when these are run.

    Raises:
        Malformed: on the host, the message names the row, and what is wrong with it.

    """
    if launches is not None:
        return decode_joined([part], launches)
    device = part.data.device
    if device.type == "cpu":
        decoded = DecodedPart(part.rows, device)
        _decode_native(part, part.plain_data(), decoded, num_threads)
        return decoded
    from vllm.inflight.delta.device_decode import Launches

    own = Launches(device)
    decoded = decode_joined([part], own)
    own.run()
    return decoded


def decode_joined(parts: Sequence[Part], launches: Launches) -> DecodedPart:
    """Decode parts of one delta together, by kernels, when `launches` are run.

    So they take as many launches as one part. As in `decode_unproved`, a place may be
    any number until `require_sound` tells.

    Args:
        parts: checked parts in their order, whose data is on one GPU.
        launches: of that GPU.

    """
    from vllm.inflight.delta.device_decode import Joined, decode_rows

    joined = Joined.of(parts, launches)
    decoded = DecodedPart(joined.rows, joined.data.device)

    def keep(fault: torch.Tensor) -> None:
        decoded.fault = fault

    room = decoded.slots, decoded.places, decoded.bits
    decode_rows(joined, *room, launches, keep)
    return decoded


def require_sound(faults: Sequence[torch.Tensor | None]) -> None:
    """Raise `Malformed` for the first of some parts whose data is malformed.

    Args:
        faults: `DecodedPart.fault` of each part.

    """
    if found := [fault for fault in faults if fault is not None]:
        from vllm.inflight.delta.device_decode import require_none

        require_none(found)


def apply(changes: Changes, flat_view: torch.Tensor, *, num_threads: int = 1) -> None:
    """Write changes into a tensor that has the old bits.

    Args:
        changes: the changes of this tensor.
        flat_view: the tensor as a flat view of its memory.
        num_threads: threads that share the work on the host.

    Raises:
        ValueError: a place is beyond the tensor, or it is no such view.

    """
    width = changes.bits.element_size()
    if flat_view.dim() != 1 or not flat_view.is_contiguous():
        raise ValueError("changes are applied to a flat, contiguous view")
    if flat_view.element_size() != width or flat_view.device != changes.bits.device:
        raise ValueError("the tensor has another width or device than its changes")
    if flat_view.device.type == "cpu":
        places, bits = changes.places.contiguous(), changes.bits.contiguous()
        native_core().delta_apply(
            *(flat_view.data_ptr(), flat_view.numel(), places.data_ptr()),
            *(bits.data_ptr(), len(places), width, changes.are_differences),
            num_threads,
        )
        return
    # Else the GPU would find out, and be of no more use to this process.
    is_beyond = (changes.places < 0) | (changes.places >= flat_view.numel())
    if bool(is_beyond.any()):
        raise ValueError("a place is beyond the tensor")
    integers = flat_view.view(changes.bits.dtype)
    new = changes.bits
    if changes.are_differences:
        new = changes.new_bits(integers[changes.places])
    integers.index_copy_(0, changes.places, new)


def before(counts: Numbers) -> Numbers:
    """The sum before each number."""
    return np.cumsum(counts) - counts


def _sums(numbers: Numbers, firsts: Numbers) -> Numbers:
    """The sum of each group, given its first number."""
    if not len(firsts):
        return numbers
    return np.add.reduceat(numbers, firsts)


def _decode_native(
    part: Part, data: torch.Tensor, decoded: DecodedPart, num_threads: int
) -> None:
    table, places, bits = part.checked_table, decoded.places, decoded.bits
    slots = np.ascontiguousarray(decoded.slots)
    try:
        native_core().delta_decode(
            *(table.data_ptr(), len(slots), data.data_ptr(), data.numel()),
            *(slots.ctypes.data, places.data_ptr(), places.numel()),
            *(bits.data_ptr(), bits.numel(), num_threads),
        )
    except ValueError as error:
        raise Malformed(f"a part of the delta is malformed: {error}") from None
