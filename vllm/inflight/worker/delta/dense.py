"""Dense in, log out: whole tensors of an update, with delta staging.

A whole tensor is compared with the live parameters, along the copies that its loader
would make. Only the elements that differ enter the log. Nothing has to be known of the
version that is served, and nothing else of the tensor is kept.

On a GPU all tensors of a batch are compared by two launches, with the padding that
their loaders fill with zero. Copies that the kernels do not follow are compared by
torch, as on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from vllm.inflight import ops
from vllm.inflight.delta.device_decode import launch_table, to_device
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.ops.reference import row_major
from vllm.inflight.worker.delta.destinations import (
    MOST_DIMS,
    WORD,
    Destinations,
    KnownDestinations,
    is_short,
    steps_of,
)
from vllm.inflight.worker.replay_plan import Entry, View
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import elements

PIECE = 1 << 24
"""Elements that torch compares at once; each that differs takes up to 40 bytes of
scratch memory."""

MOST_AT_ONCE = (1 << 31) - 4096
"""Elements of a copy that the kernels do not follow: they count them in 32 bits."""


class Came(NamedTuple):
    """A whole tensor of an update: its name, what its loader would do, its content.

    The tensor is contiguous.
    """

    name: str
    entry: Entry
    tensor: torch.Tensor


class Row(NamedTuple):
    """One copy that the kernels follow, or one fill with zero."""

    param: str
    width: int
    in_words: bool
    """Whether both sides can be read in words."""
    numbers: list[int]
    """The first columns of its row, see compare_kernels.py; elements, not units."""
    steps: Sequence[int]
    """Size and both strides of each dimension, in elements."""


class Comparison:
    """Compares what comes with what is served.

    Args:
        log: of the rank.
        live: the live parameters, by name.
        known: where the tensors of the model are served.

    """

    def __init__(
        self,
        log: ChangeLog,
        live: Mapping[str, torch.Tensor],
        known: KnownDestinations,
    ) -> None:
        self._log, self._live, self._known = log, live, known
        self._has_kernels = log.device.type == "cuda"
        self._zero = torch.zeros(1, dtype=torch.int64, device=log.device)
        """The source of all padding, with a stride of 0."""

    def log_differences(self, batch: Iterable[Came]) -> None:
        """Log the elements in which these tensors differ from what is served."""
        rows: dict[tuple[int, bool], list[Row]] = {}
        for came in batch:
            places = None
            if self._has_kernels:
                places = self._known.find(came.name, came.entry)
            if places is None or not self._can_follow(places, came.tensor):
                log_differences(self._log, self._live, came.entry, came.tensor)
                continue
            for row in self._rows(places, came.tensor):
                rows.setdefault((row.width, row.in_words), []).append(row)
        for (width, in_words), alike in rows.items():
            compare_on_device(self._log, alike, width, in_words=in_words)

    def _can_follow(self, places: Destinations, tensor: torch.Tensor) -> bool:
        sizes = [tensor.numel(), *(prod(z.view[1]) for z in places.entry.zeros)]
        is_small = max(sizes) < MOST_AT_ONCE
        is_small &= all(is_short(zeroed.view) for zeroed in places.entry.zeros)
        return is_small and tensor.device == self._log.device

    def _rows(self, places: Destinations, tensor: torch.Tensor) -> Iterable[Row]:
        width, start = tensor.element_size(), tensor.data_ptr()
        for copied, steps, run in zip(
            places.copies, places.steps.tolist(), places.runs.tolist(), strict=True
        ):
            num = prod(copied.part[1])
            source = start + width * steps[0]
            view = self._live[copied.param].data_ptr() + width * steps[1]
            in_words = not (width * run % WORD or source % WORD or view % WORD)
            numbers = [source, view, num, 0, steps[1]]
            if num:
                yield Row(copied.param, width, in_words, numbers, steps[2:])
        for zeroed in places.entry.zeros:
            offset, shape, _ = zeroed.view
            width = self._live[zeroed.param].element_size()
            view = self._live[zeroed.param].data_ptr() + width * offset
            numbers = [self._zero.data_ptr(), view, prod(shape), 0, offset]
            nowhere = 0, shape, (0,) * len(shape)
            steps = steps_of(nowhere, zeroed.view)[2:]
            yield Row(zeroed.param, width, False, numbers, steps)


def compare_on_device(
    log: ChangeLog, rows: Sequence[Row], width: int, *, in_words: bool
) -> None:
    """Compare copies of one element width, and log what differs."""
    from vllm.inflight.worker.delta import compare_kernels as kernels

    table = np.zeros((len(rows), kernels.COLUMNS), dtype=np.int64)
    table[:, :5] = [row.numbers for row in rows]
    table[:, 9:] = [row.steps for row in rows]
    # The dimensions that are longer than one come first.
    dims = table[:, 9:].reshape(len(rows), MOST_DIMS, 3)
    last = np.maximum((dims[:, :, 0] > 1).sum(1), 1) - 1
    table[:, 8] = last + 1
    if (pieces := WORD // width if in_words else 1) > 1:
        at = np.arange(len(rows)), last
        table[:, 2] //= pieces
        dims[*at, 0] //= pieces
        dims[:, :, 1:] //= pieces
        dims[*at, 1:] = 1
        table[:, 9:] = dims.reshape(len(rows), -1)
    num_programs = -(-table[:, 2] // kernels.BLOCK)
    on_device, owners = launch_table(table, 3, num_programs, log.device)
    found = kernels.count(on_device, owners, width, in_words=in_words)
    firsts = torch.cat((found.ends[on_device[:, 3]], found.ends[-1:]))
    # This waits until they are counted: the log has to know how much room they take.
    counts = np.diff(to_host(firsts).numpy())
    differ = np.flatnonzero(counts)
    if not len(differ):
        return
    params = [rows[number].param for number in differ.tolist()]
    widths = np.full(len(differ), width, dtype=np.int64)
    if (reserved := log.reserve_all(params, counts[differ], widths)) is not None:
        table[differ, 5:8] = np.stack(reserved, 1)
        on_device = to_device(table, log.device)
        sums = log.sums_on_device()
        kernels.log(on_device, owners, found, sums, width, in_words=in_words)


def log_differences(
    log: ChangeLog,
    live: Mapping[str, torch.Tensor],
    entry: Entry,
    tensor: torch.Tensor,
) -> None:
    """Log the elements in which a tensor differs from what is served, with torch.

    Args:
        log: of the rank.
        live: the live parameters, by name.
        entry: what the loader would do with the tensor.
        tensor: contiguous.

    """
    first = int(tensor.storage_offset())
    for copied in entry.copies:
        offset, shape, stride = copied.part
        source = tensor.as_strided(shape, stride, first + offset)
        _compare(log, live, copied.param, copied.view, source)
    for zeroed in entry.zeros:
        param = live[zeroed.param]
        zero = torch.zeros((), dtype=param.dtype, device=param.device)
        _compare(log, live, zeroed.param, zeroed.view, zero.expand(zeroed.view[1]))


def log_parameter(
    log: ChangeLog, live: Mapping[str, torch.Tensor], param: str, content: torch.Tensor
) -> None:
    """Log the elements in which a whole parameter differs from what is served.

    Args:
        log: of the rank.
        live: the live parameters, by name.
        param: name of the parameter.
        content: in the shape that is served.

    """
    view = 0, tuple(content.shape), live[param].stride()
    _compare(log, live, param, view, content)


def _compare(
    log: ChangeLog,
    live: Mapping[str, torch.Tensor],
    param: str,
    view: View,
    source: torch.Tensor,
) -> None:
    """Compare a view of a parameter with what the update brings for it."""
    offset, shape, stride = view
    if prod(shape) > PIECE:
        dim = max(range(len(shape)), key=shape.__getitem__)
        half = shape[dim] // 2
        for at, size in ((0, half), (half, shape[dim] - half)):
            cut = (*shape[:dim], size, *shape[dim + 1 :])
            part = offset + at * stride[dim], cut, stride
            _compare(log, live, param, part, source.narrow(dim, at, size))
        return
    held = live[param].data
    integer = ops.INTEGERS[held.element_size()]
    served = held.as_strided(shape, stride, held.storage_offset() + offset)
    new = source.to(served.device, served.dtype).contiguous().view(integer)
    (places,) = (new != served.view(integer)).reshape(-1).nonzero(as_tuple=True)
    if not len(places):
        return
    if not log.has_room:  # the rest is counted all the same
        log.reserve(param, len(places), held.element_size())
        return
    offsets = _offsets(places, view)
    log.add(param, offsets, elements(held, integer)[offsets], new.view(-1)[places])


def _offsets(places: torch.Tensor, view: View) -> torch.Tensor:
    """The offsets of elements of a view, given their row-major numbers in it."""
    offset, shape, stride = view
    if tuple(stride) == tuple(row_major(shape)):
        return places + offset
    offsets = torch.full_like(places, offset)
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        offsets += places % size * step
        places = places.div(size, rounding_mode="floor")
    return offsets


def warm(device: torch.device, dtypes: set[torch.dtype]) -> None:
    """Compile the kernels for these dtypes now, and not while decoding."""
    for width in {dtype.itemsize for dtype in dtypes}:
        log = ChangeLog(device, 1 << 12)
        served, new = (
            torch.full((WORD,), fill, dtype=ops.INTEGERS[width], device=device)
            for fill in (0, 1)
        )
        numbers = [new.data_ptr(), served.data_ptr(), WORD, 0, 0]
        steps = [WORD, 1, 1, *[1, 1 << 62, 0] * 3]
        for in_words in (True, False):
            row = Row("", width, in_words, numbers, steps)
            compare_on_device(log, [row], width, in_words=in_words)
        torch.cuda.current_stream(device).synchronize()
