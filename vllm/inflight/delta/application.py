"""Applying all parts of a delta to the tensors that they change."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from vllm.inflight.delta.decode import apply, decode, decode_unproved, require_sound
from vllm.inflight.delta.decoded import DecodedPart
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.delta.part import Part
from vllm.inflight.ops.launch_tables import Table


def apply_all(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> None:
    """Write the changes of a delta into tensors that have the old bits.

    Args:
        parts: of the delta, which were checked. All are on the device of the tensors.
        tensors: by their number in the parts, contiguous.

    Raises:
        Malformed: the data of a part is malformed. The tensors may have any bits then.
        ValueError: a tensor is not contiguous, or has another width or device than its
            changes.

    """
    if any(part.data.device.type != "cpu" for part in parts):
        apply_on_device(parts, tensors)
        return
    for part in parts:
        for changes in decode(part):
            apply(changes, tensors[changes.number].view(-1))


def apply_on_device(parts: Sequence[Part], tensors: Sequence[torch.Tensor]) -> None:
    """The same on a GPU: a few launches a part, whatever the number of its tensors.

    The host waits once, at the end. There is a part at least.
    """
    device = parts[0].data.device
    devices = {tensor.device for tensor in tensors}
    if devices | {part.data.device for part in parts} != {device}:
        raise ValueError("the tensors are on another device than the changes")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("changes are applied to contiguous tensors")
    columns = [(t.data_ptr(), t.numel(), t.element_size()) for t in tensors]
    targets = np.array(columns, dtype=np.int64).reshape(-1, 3)
    launches, faults = Launches(device), []
    for part in parts:
        changes = decode_unproved(part, launches=launches)
        _add(changes, targets[changes.groups.numbers], launches)
        launches.run()
        faults.append(changes.fault)
        del changes  # the next part gets its memory
    require_sound(faults)


def _add(changes: DecodedPart, targets: Table, launches: Launches) -> None:
    """Write these changes when the launches are run.

    Args:
        changes: of one part, which the launches decode before, and whose memory they
            hold.
        targets: for each group the address, the elements and the width of its tensor.
        launches: get one launch for each width.

    """
    from vllm.inflight.delta import triton_kernels as kernels

    groups = changes.groups
    addresses, sizes, widths = targets.T
    if (widths != groups.widths).any():
        raise ValueError("a tensor has another width than its changes")
    rows = np.zeros((len(groups), kernels.APPLY_COLUMNS), dtype=np.int64)
    rows[:, :2] = changes.addresses
    rows[:, 2], rows[:, 3], rows[:, 4] = addresses, sizes, groups.counts
    rows[:, 6] = groups.are_differences
    for width in np.unique(widths).tolist():
        own = rows[widths == width]
        num_programs = -(-own[:, 4] // kernels.ENTRIES_PER_STEP)
        launch = functools.partial(kernels.apply, width=width)
        launches.add_programs(own, 5, num_programs, launch)
