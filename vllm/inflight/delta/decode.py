"""Decoding a part, and writing its changes into a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.inflight.delta.decoded import Changes, DecodedPart, Groups
from vllm.inflight.delta.part import Part
from vllm.inflight.errors import Malformed
from vllm.inflight.ops import native_core

if TYPE_CHECKING:
    from vllm.inflight.delta.device_decode import Launches


def decode(part: Part, *, num_threads: int = 1) -> DecodedPart:
    """Decode all of a part.

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
        decoded = DecodedPart(Groups(part.rows), device)
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
    decoded = DecodedPart(Groups(joined.rows), joined.data.device)
    decode_rows(joined, decoded, launches)
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
