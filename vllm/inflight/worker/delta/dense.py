"""Dense in, log out: whole tensors of an update, with delta staging.

A whole tensor is compared with the live parameters, along the copies that its loader
would make. Only the elements that differ enter the log. Nothing has to be known of the
version that is served, and nothing else of the tensor is kept.

On a GPU all tensors of a batch are compared by two launches, with the padding that
their loaders fill with zero. The host waits once, for the room that a batch takes in
the log. Copies that the kernels do not follow are compared by torch, as on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from vllm.inflight import ops
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.ops.launch_tables import LaunchTable, to_device
from vllm.inflight.ops.reference import row_major
from vllm.inflight.worker.delta.destinations import (
    MOST_DIMS,
    WORD,
    Destinations,
    KnownDestinations,
    is_short,
    steps_of,
)
from vllm.inflight.worker.model_state import ModelState, recall
from vllm.inflight.worker.replay_plan import Entry, View
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import elements
from vllm.inflight.worker.shadow.log_entries import Numbers

if TYPE_CHECKING:  # Triton is not everywhere
    from vllm.inflight.worker.delta.compare_kernels import Table

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


class KnownTable(NamedTuple):
    """A table of copies that were compared, for the next version in the same memory."""

    table: Table
    params: list[str]
    """The parameter of each copy."""
    widths: Numbers
    """Bytes of an element of each."""
    zero: torch.Tensor
    """The source of padding, which lives as long as its address is used."""


Key = tuple[tuple[Destinations, tuple[int, ...]], ...]
"""Where some tensors are served; the address of each, and those of its parameters."""


class KnownTables:
    """The tables of this update and of the last one; kept on the module that is loaded.

    A transport uses its memory again, and a trainer lends the same. So the tables of
    one version fit the next.
    """

    def __init__(self) -> None:
        self._now: dict[Key, KnownTable] = {}
        self._last: dict[Key, KnownTable] = {}

    @classmethod
    def of(cls, module: torch.nn.Module) -> Self:
        """What is known of a module."""
        if (known := recall(module, cls)) is None:
            ModelState.of(module).set(known := cls())
        return known

    def begin(self) -> None:
        """Begin an update: what the last one has not used is forgotten."""
        self._now, self._last = {}, self._now

    def find(self, key: Key, make: Callable[[], KnownTable]) -> KnownTable:
        """The table of some tensors; `make` makes it where it is not known."""
        if (known := self._now.get(key) or self._last.get(key)) is None:
            known = make()
        self._now[key] = known
        return known


class Comparison:
    """Compares what comes with what is served.

    Args:
        log: of the rank.
        live: the live parameters, by name.
        known: where the tensors of the model are served.
        tables: of earlier updates.

    """

    def __init__(
        self,
        log: ChangeLog,
        live: Mapping[str, torch.Tensor],
        known: KnownDestinations,
        tables: KnownTables | None = None,
    ) -> None:
        self._log, self._live, self._known = log, live, known
        self._has_kernels = log.device.type == "cuda"
        self._tables = KnownTables() if tables is None else tables
        self._has_begun = False

    def log_differences(self, batch: Iterable[Came]) -> None:
        """Log the elements in which these tensors differ from what is served."""
        followed: list[tuple[Destinations, torch.Tensor]] = []
        for came in batch:
            places = None
            if self._has_kernels:
                places = self._known.find(came.name, came.entry)
            if places is None or not self._can_follow(places, came.tensor):
                log_differences(self._log, self._live, came.entry, came.tensor)
                continue
            followed.append((places, came.tensor))
        if not followed:
            return
        if not self._has_begun:
            self._has_begun = True
            self._tables.begin()
        key = tuple(
            (places, (tensor.data_ptr(), *self._addresses(places)))
            for places, tensor in followed
        )
        compare_on_device(self._log, self._tables.find(key, lambda: self._make(key)))

    def _addresses(self, places: Destinations) -> Iterator[int]:
        for copied in places.entry.copies:
            yield self._live[copied.param].data_ptr()
        for zeroed in places.entry.zeros:
            yield self._live[zeroed.param].data_ptr()

    def _make(self, key: Key) -> KnownTable:
        device = self._log.device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        rows = [row for each in key for row in self._rows(*each, zero)]
        return make_table(rows, zero)

    def _can_follow(self, places: Destinations, tensor: torch.Tensor) -> bool:
        sizes = [tensor.numel(), *(prod(z.view[1]) for z in places.entry.zeros)]
        is_small = max(sizes) < MOST_AT_ONCE
        is_small &= all(is_short(zeros(z.view), z.view) for z in places.entry.zeros)
        return is_small and tensor.device == self._log.device

    def _rows(
        self, places: Destinations, addresses: tuple[int, ...], zero: torch.Tensor
    ) -> Iterator[Row]:
        entry = places.entry
        width, (start, *params) = entry.dtype.itemsize, addresses
        for copied, steps, run, param in zip(
            *(entry.copies, places.steps.tolist(), places.runs.tolist()),
            params[: len(entry.copies)],
            strict=True,
        ):
            source, view = start + width * steps[0], param + width * steps[1]
            in_words = not (width * run % WORD or source % WORD or view % WORD)
            numbers = [source, view, prod(copied.part[1]), 0, steps[1]]
            yield Row(copied.param, width, in_words, numbers, steps[2:])
        for zeroed, param in zip(entry.zeros, params[len(entry.copies) :], strict=True):
            offset, shape, _ = zeroed.view
            width = self._live[zeroed.param].element_size()
            view = param + width * offset
            numbers = [zero.data_ptr(), view, prod(shape), 0, offset]
            steps = steps_of(zeros(zeroed.view), zeroed.view)[2:]
            yield Row(zeroed.param, width, False, numbers, steps)


def zeros(view: View) -> View:
    """One zero as a part of the shape of a view: its strides are 0."""
    return 0, view[1], (0,) * len(view[1])


def make_table(rows: Iterable[Row], zero: torch.Tensor) -> KnownTable:
    """The table of some copies, on the device of `zero`, their source of padding."""
    from vllm.inflight.worker.delta import compare_kernels as kernels

    alike: dict[tuple[int, bool], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.width, row.in_words), []).append(row)
    rows = [row for group in alike.values() for row in group]
    widths = np.array([row.width for row in rows], dtype=np.int64)
    in_words = np.array([row.in_words for row in rows], dtype=bool)
    table = np.zeros((len(rows), kernels.COLUMNS), dtype=np.int64)
    table[:, :5] = [row.numbers for row in rows]
    table[:, 6:] = [row.steps for row in rows]
    # The dimensions that are longer than one come first.
    dims = table[:, 6:].reshape(len(rows), MOST_DIMS, 3)
    last = np.maximum((dims[:, :, 0] > 1).sum(1), 1) - 1
    table[:, 5] = last + 1
    pieces = np.where(in_words, WORD // widths, 1)
    table[:, 2] //= pieces
    at = np.arange(len(rows)), last
    dims[*at, 0] //= pieces
    dims[:, :, 1:] //= pieces[:, None, None]
    dims[*at, 1:] = np.where((pieces > 1)[:, None], 1, dims[*at, 1:])
    table[:, 6:] = dims.reshape(len(rows), -1)
    num_programs = -(-table[:, 2] // kernels.BLOCK)
    on_device, owners = LaunchTable.of(table, 3, num_programs, zero.device)
    groups, first, base = [], 0, 0
    for (width, are_words), group in alike.items():
        num = int(num_programs[first : first + len(group)].sum())
        if num:
            groups.append(kernels.Programs(base, num, width, are_words))
        first, base = first + len(group), base + num
    return KnownTable(
        kernels.Table(on_device, owners, len(rows), base, groups),
        [row.param for row in rows],
        widths,
        zero,
    )


def compare_on_device(log: ChangeLog, known: KnownTable) -> None:
    """Compare copies, and log what differs."""
    from vllm.inflight.worker.delta import compare_kernels as kernels

    counted = kernels.count(known.table, log.take_notes())
    # This waits until they are counted: the log has to know how much room they take.
    counts = to_host(counted.found[: known.table.num_rows]).numpy().astype(np.int64)
    differ = np.flatnonzero(counts)
    if not len(differ):
        return
    params = [known.params[number] for number in differ.tolist()]
    reserved = log.reserve_all(params, counts[differ], known.widths[differ])
    if reserved is not None:
        rooms = np.zeros((len(counts), kernels.ROOM_COLUMNS), dtype=np.int64)
        rooms[differ] = np.stack(reserved, 1)
        on_device = to_device(rooms, log.device)
        kernels.log(known.table, counted, on_device, log.sums_on_device())


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
            compare_on_device(log, make_table([row], new))
        torch.cuda.current_stream(device).synchronize()
