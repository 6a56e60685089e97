"""Writing a delta on a GPU: tables for the kernels, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from vllm.inflight import ops
from vllm.inflight.delta import Changes, Encoder, Part, decode
from vllm.inflight.worker.delta.destinations import (
    Destinations,
    follow,
    widest_first,
)
from vllm.inflight.worker.replay_plan import Copied, Entry
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import ChangedElements, Stretch
from vllm.inflight.worker.shadow.launch_tables import owners_of, table_of

Params = Mapping[str, torch.Tensor]

NEVER = 1 << 62
"""A step that no place reaches: the stride of a dimension that is not there."""


class _Write(NamedTuple):
    """Changes of one tensor that go where one copy takes them."""

    changes: Changes
    copied: Copied
    dtype: torch.dtype
    places: torch.Tensor
    bits: torch.Tensor


class DeviceWriter:
    """Writes the changes of a delta, a part at a time.

    Args:
        device: of the parameters.
        live: the served parameters.
        shadow: the shadow parameters, or the log that stands for them.
        num_tensors: tensors that the delta changes.

    """

    def __init__(
        self,
        device: torch.device,
        live: Params,
        shadow: Params | ChangeLog,
        num_tensors: int,
    ) -> None:
        from vllm.inflight.worker.delta.triton_kernels import SUMS

        self._device, self._live, self._shadow = device, live, shadow
        shape = num_tensors, SUMS
        self._sums = torch.zeros(shape, dtype=torch.int64, device=device)

    def write(
        self,
        changes: Sequence[Changes],
        places: Sequence[Destinations],
        dtypes: Sequence[torch.dtype],
        note: Callable[[ChangedElements], None],
    ) -> None:
        """Write these changes into the shadow parameters, or into the log.

        Args:
            changes: of one part.
            places: where the elements of each tensor of the delta are served.
            dtypes: of each tensor.
            note: called with the places of the elements, before the first is written
                into a shadow parameter.

        """
        from vllm.inflight.worker.delta import triton_kernels as kernels

        log = self._shadow if isinstance(self._shadow, ChangeLog) else None
        writes = [
            _Write(
                *(each, copied, dtypes[each.number]),
                *self._entries(each, copied, places[each.number]),
            )
            for each in changes
            for copied in places[each.number].copies
        ]
        spaces = self._spaces(writes, note)
        if log is not None and not log.has_room:
            return  # the rest is counted all the same
        rows: dict[int, list[list[int]]] = {}
        for one, (offsets, target, first) in zip(writes, spaces, strict=True):
            part, view = one.copied.part, one.copied.view
            dims = widest_first(part[1], part[2], view[2])
            dims += [(1, NEVER, 0)] * (kernels.DIMS - len(dims))
            number, is_added = one.changes.number, one.changes.are_differences
            nan_byte = ops.NAN_BYTES.get(one.dtype, -1)
            rows.setdefault(one.dtype.itemsize, []).append(
                [
                    *(one.places.data_ptr(), one.bits.data_ptr()),
                    *(self._live[one.copied.param].data_ptr(), target, offsets),
                    *(len(one.places), 0, number, int(is_added)),
                    *(ops.nonfinite_limit(one.dtype), nan_byte, part[0], view[0]),
                    *(first, 0, 0),
                    *(each for dim in dims for each in dim),
                ]
            )
        log_sums = None if log is None else log.sums_on_device()
        for width, table in rows.items():
            owners = owners_of(table, 5, 6, kernels.BLOCK, self._device)
            on_device = table_of(table, self._device)
            kernels.write(on_device, owners, self._sums, width, log_sums)

    def _entries(
        self, changes: Changes, copied: Copied, places: Destinations
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places and bits of the changes that a copy may take.

        A shadow parameter is written where an element is, and nowhere else. The log
        shall hold no elements that other ranks serve.
        """
        if not isinstance(self._shadow, ChangeLog) or places.is_whole(copied):
            return changes.places, changes.bits
        _, is_here = follow(changes.places, copied.part, copied.view)
        (chosen,) = is_here.nonzero(as_tuple=True)
        return changes.places[chosen], changes.bits[chosen]

    def _spaces(
        self, writes: Sequence[_Write], note: Callable[[ChangedElements], None]
    ) -> list[tuple[int, int, int]]:
        """For each write: addresses of its offsets and of its target, and the number of
        its first element in the log."""
        groups = [
            (one.copied.param, len(one.places), one.dtype.itemsize) for one in writes
        ]
        if isinstance(target := self._shadow, ChangeLog):
            found = [target.reserve(*group) for group in groups]
            return [
                (each.offsets.data_ptr(), each.bits.data_ptr(), each.first)
                for each in found
                if each is not None
            ]
        size = sum(num for _, num, _ in groups)
        offsets = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        firsts = [0, *accumulate(num for _, num, _ in groups)]
        stretches = [
            Stretch(param, first, first + num, width)
            for first, (param, num, width) in zip(firsts, groups, strict=False)
        ]
        note(ChangedElements(offsets, tuple(stretches)))
        return [
            (offsets.data_ptr() + 4 * first, target[param].data_ptr(), 0)
            for param, first, _, _ in stretches
        ]

    def results(self) -> list[list[int]]:
        """For each tensor: both halves of what its digest changes by, elements that
        become NaN or Inf, and elements written."""
        return self._sums.tolist()


def warm(
    device: torch.device, dtypes: set[torch.dtype], *, is_logged: bool = False
) -> None:
    """Compile the kernels for these dtypes now, and not while decoding.

    Args:
        device: of the parameters.
        dtypes: of the parameters.
        is_logged: whether changes go into the log of delta staging.

    """
    for dtype in {each.itemsize: each for each in dtypes}.values():
        # Changes that are far apart, which are coded as gaps.
        old = torch.zeros(4096, dtype=ops.INTEGERS[dtype.itemsize], device="cpu")
        new = old.clone()
        new[3::512] = 1
        encoder = Encoder()
        (host,) = [*encoder.add(0, old, new), *encoder.finish()]
        part = Part(host.table, host.data.to(device))
        part.check([old.numel()], [dtype.itemsize])
        live, shadow = {"": old.to(device)}, {"": new.to(device)}
        view = 0, tuple(old.shape), tuple(old.stride())
        copied = Copied("", view, view, new, is_exact=True)
        entry = Entry(old.shape, old.dtype, [copied], is_proved=True)
        places = Destinations.of(entry)
        assert places is not None
        log = ChangeLog(device, 1 << 12) if is_logged else None
        writer = DeviceWriter(device, live, shadow if log is None else log, 1)
        logs: list[ChangedElements] = []
        writer.write(list(decode(part)), [places], [old.dtype], logs.append)
        for each in logs:
            copy_elements(each, live, shadow)
        writer.results()


def copy_elements(changed: ChangedElements, live: Params, shadow: Params) -> None:
    """Copy logged elements from live to shadow parameters, on their GPU."""
    from vllm.inflight.worker.delta import triton_kernels as kernels

    rows: dict[int, list[list[int]]] = {}
    log, device = changed.offsets.data_ptr(), changed.offsets.device
    for param, first, end, width in changed.stretches:
        addresses = live[param].data_ptr(), shadow[param].data_ptr()
        rows.setdefault(width, []).append([log + 4 * first, *addresses, end - first, 0])
    for width, table in rows.items():
        owners = owners_of(table, 3, 4, kernels.BLOCK, device)
        kernels.copy(table_of(table, device), owners, width)
