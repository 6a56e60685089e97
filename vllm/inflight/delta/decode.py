"""Decoding a part: the changed elements of each tensor, and their bits."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm.inflight.delta.part import Block, Part, ValueForm, array_address
from vllm.inflight.errors import Malformed
from vllm.inflight.ops import INTEGERS, native_core


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


def decode(part: Part, *, num_threads: int = 1) -> Iterator[Changes]:
    """Decode all of a part, then return the changes, tensor by tensor.

    A tensor comes twice in a row, with later places, if the forms of its values change.

    Args:
        part: a part that was checked. It is decoded on the device of its data.
        num_threads: threads that share the blocks on the host.

    Raises:
        Malformed: the message names the row, and what is wrong with it. Nothing was
            returned before.

    """
    groups = list(_groups(part.blocks()))
    num_places = num_bytes = 0
    slots = array("Q")
    outputs = []
    for group in groups:
        num_bytes = -(-num_bytes // 8) * 8
        outputs.append((num_places, num_bytes))
        for block in group:
            slots.extend((num_places, num_bytes))
            num_places += block.num_entries
            num_bytes += block.num_entries * block.width
    data = part.plain_data()
    places = torch.empty(num_places, dtype=torch.int64, device=data.device)
    bits = torch.empty(num_bytes, dtype=torch.uint8, device=data.device)
    if data.device.type == "cpu":
        _decode_native(part, data, slots, places, bits, num_threads)
    else:
        from vllm.inflight.delta.device_decode import decode_blocks

        decode_blocks([b for g in groups for b in g], data, slots, places, bits)
    return _split(groups, outputs, places, bits)


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


def _groups(blocks: list[Block]) -> Iterator[list[Block]]:
    """Neighbours of one tensor and one form of values."""
    group: list[Block] = []
    for block in blocks:
        if group and (block.number, block.values) != (group[0].number, group[0].values):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def _decode_native(
    part: Part,
    data: torch.Tensor,
    slots: array[int],
    places: torch.Tensor,
    bits: torch.Tensor,
    num_threads: int,
) -> None:
    table = part.checked_table
    try:
        native_core().delta_decode(
            *(table.data_ptr(), len(slots) // 2, data.data_ptr(), data.numel()),
            *(array_address(slots), places.data_ptr(), places.numel()),
            *(bits.data_ptr(), bits.numel(), num_threads),
        )
    except ValueError as error:
        raise Malformed(f"a part of the delta is malformed: {error}") from None


def _split(
    groups: list[list[Block]],
    outputs: list[tuple[int, int]],
    places: torch.Tensor,
    bits: torch.Tensor,
) -> Iterator[Changes]:
    for group, (place, byte) in zip(groups, outputs, strict=True):
        block = group[0]
        num = sum(each.num_entries for each in group)
        own = bits[byte : byte + num * block.width].view(INTEGERS[block.width])
        is_difference = block.values == ValueForm.DIFFERENCE
        yield Changes(block.number, places[place : place + num], own, is_difference)
