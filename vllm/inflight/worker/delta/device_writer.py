"""Writing a delta on a GPU: tables for the kernels, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from vllm.inflight import ops
from vllm.inflight.delta import Changes, Encoder, Part, decode
from vllm.inflight.worker.delta.destinations import Destinations, widest_first
from vllm.inflight.worker.replay_plan import Copied, Entry
from vllm.inflight.worker.shadow.changed_elements import ChangedElements, Stretch

Params = Mapping[str, torch.Tensor]

NEVER = 1 << 62
"""A step that no place reaches: the stride of a dimension that is not there."""


class DeviceWriter:
    """Writes the changes of a delta, a part at a time.

    Args:
        device: of the parameters.
        live: the served parameters.
        shadow: the shadow parameters.
        num_tensors: tensors that the delta changes.

    """

    def __init__(
        self, device: torch.device, live: Params, shadow: Params, num_tensors: int
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
        """Write these changes into the shadow parameters.

        Args:
            changes: of one part.
            places: where the elements of each tensor of the delta are served.
            dtypes: of each tensor.
            note: called with the log of the elements, before the first is written.

        """
        from vllm.inflight.worker.delta import triton_kernels as kernels

        counts = [
            len(each.places) for each in changes for _ in places[each.number].copies
        ]
        log = torch.full((sum(counts),), -1, dtype=torch.int32, device=self._device)
        rows: dict[int, list[list[int]]] = {}
        stretches: list[Stretch] = []
        first = 0
        for each in changes:
            dtype = dtypes[each.number]
            width = dtype.itemsize
            limit = ops.nonfinite_limit(dtype)
            nan_byte = ops.NAN_BYTES.get(dtype, -1)
            num = len(each.places)
            for copied in places[each.number].copies:
                (start, shape, stride), view = copied.part, copied.view
                dims = widest_first(shape, stride, view[2])
                dims += [(1, NEVER, 0)] * (kernels.DIMS - len(dims))
                param = copied.param
                rows.setdefault(width, []).append(
                    [
                        *(each.places.data_ptr(), each.bits.data_ptr()),
                        *(self._live[param].data_ptr(), self._shadow[param].data_ptr()),
                        *(log.data_ptr() + 4 * first, num, 0, each.number),
                        *(int(each.are_differences), limit, nan_byte, start, view[0]),
                        *(0, 0, 0),
                        *(number for dim in dims for number in dim),
                    ]
                )
                stretches.append(Stretch(param, first, first + num, width))
                first += num
        note(ChangedElements(log, tuple(stretches)))
        for width, table in rows.items():
            owners = _owners(table, 5, 6, self._device)
            on_device = _table(table, self._device)
            kernels.write(on_device, owners, self._sums, width)

    def results(self) -> list[list[int]]:
        """For each tensor: both halves of what its digest changes by, elements that
        become NaN or Inf, and elements written."""
        return self._sums.tolist()


def warm(device: torch.device, dtypes: set[torch.dtype]) -> None:
    """Compile the kernels for these dtypes now, and not while decoding."""
    for dtype in {each.itemsize: each for each in dtypes}.values():
        # Changes that are far apart, which are coded as gaps.
        old = torch.zeros(4096, dtype=ops.INTEGERS[dtype.itemsize], device="cpu")
        new = old.clone()
        new[3::512] = 1
        encoder = Encoder()
        (host,) = [*encoder.add(0, old, new), *encoder.finish()]
        part = Part(host.table, host.data.to(device))
        part.check([old.numel()], [dtype.itemsize])
        params = {"": old.to(device)}, {"": new.to(device)}
        view = 0, tuple(old.shape), tuple(old.stride())
        copied = Copied("", view, view, new, is_exact=True)
        entry = Entry(old.shape, old.dtype, [copied], is_proved=True)
        places = Destinations.of(entry)
        assert places is not None
        writer = DeviceWriter(device, *params, 1)
        logs: list[ChangedElements] = []
        writer.write(list(decode(part)), [places], [old.dtype], logs.append)
        copy_elements(logs[0], *params)
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
        owners = _owners(table, 3, 4, device)
        kernels.copy(_table(table, device), owners, width)


def _owners(
    table: list[list[int]], count: int, first: int, device: torch.device
) -> torch.Tensor:
    """The row of each program; notes in each row the number of its first program.

    Args:
        table: the rows.
        count: the column of the number of elements.
        first: the column of the first program.
        device: of the result.

    """
    from vllm.inflight.worker.delta.triton_kernels import BLOCK

    num_programs, counts = 0, []
    for row in table:
        row[first] = num_programs
        counts.append(-(-row[count] // BLOCK))
        num_programs += counts[-1]
    # Made on the host: the staging thread's default device is its GPU.
    with torch.device("cpu"):
        owners = torch.arange(len(table), dtype=torch.int32)
        owners = owners.repeat_interleave(torch.tensor(counts))
    return owners.to(device)


def _table(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
