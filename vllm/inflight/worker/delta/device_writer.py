"""Writing a delta on a GPU: tables for the kernels, and what they found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from vllm.inflight import ops
from vllm.inflight.delta import Encoder, Part
from vllm.inflight.delta.decode import (
    DecodedPart,
    before,
    decode_unproved,
    require_sound,
)
from vllm.inflight.delta.device_decode import (
    Launches,
    Table,
    require_no_fault,
)
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.worker.delta.changed_samples import ChangedSamples
from vllm.inflight.worker.delta.destinations import Destinations, follow
from vllm.inflight.worker.delta.targets import Targets
from vllm.inflight.worker.replay_plan import Copied, Entry
from vllm.inflight.worker.shadow.change_log import SUMS as LOG_SUMS
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.shadow.changed_elements import (
    ChangedElements,
    Stretch,
    addresses,
)
from vllm.inflight.worker.verify.drift import Sampler

Params = Mapping[str, torch.Tensor]

MOST_SHORT = 1 << 31
"""Elements of a tensor from which on a place does not fit into 32 bits. A parameter is
shorter, see `is_short` in destinations.py."""


class DeviceWriter:
    """Writes the changes of a delta, a part at a time.

    Args:
        device: of the parameters.
        live: the served parameters.
        shadow: the shadow parameters, or the log that stands for them.
        targets: what the tensors of the delta are written into.

    """

    def __init__(
        self,
        device: torch.device,
        live: Params,
        shadow: Params | ChangeLog,
        targets: Targets,
    ) -> None:
        from vllm.inflight.worker.delta.triton_kernels import COLUMNS, SUMS

        self._device, self._shadow, self._targets = device, shadow, targets
        # Of each copy, the columns that are the same for all parts.
        self._rows = np.zeros((len(targets.copies), COLUMNS), dtype=np.int64)
        self._rows[:, 2] = addresses(live, targets.params)
        if not isinstance(shadow, ChangeLog):
            self._rows[:, 3] = addresses(shadow, targets.params)
        tensors = targets.tensors
        number = np.repeat(np.arange(len(tensors)), tensors[:, 3])
        self._rows[:, 7], self._rows[:, 9:11] = number, tensors[number, 1:3]
        self._rows[:, 11:13] = targets.steps[:, :2]
        self._rows[:, 14] = (targets.steps[:, 2::3] > 1).sum(1)
        self._rows[:, 16:] = targets.steps[:, 2:]
        index_bits = np.where(tensors[number, 0] < MOST_SHORT, 32, 64)
        self._index_bits = np.where(targets.are_flat, 0, index_bits)
        shape = len(tensors), SUMS
        self._sums = torch.zeros(shape, dtype=torch.int64, device=device)

    def write(
        self,
        changes: DecodedPart,
        note: Callable[[ChangedElements], None],
        launches: Launches,
    ) -> None:
        """Write these changes into the shadow parameters, or into the log.

        Args:
            changes: of one part.
            note: called with the places of the elements, before the first is written
                into a shadow parameter.
            launches: the changes are decoded and written when these are run. Where a
                tensor is cut over ranks, a log needs the places before: they are run
                here then.

        """
        from vllm.inflight.worker.delta import triton_kernels as kernels

        targets = self._targets
        copy, group = targets.copies_of(changes.numbers)
        rows, counts = self._rows[copy], changes.counts[group]
        widths = changes.widths[group]
        params = [targets.params[number] for number in copy.tolist()]
        rows[:, 0] = changes.places.data_ptr() + 8 * changes.first_places[group]
        rows[:, 1] = changes.bits.data_ptr() + changes.first_bytes[group]
        rows[:, 8] = changes.are_differences[group]
        log_sums: torch.Tensor | None = None
        if isinstance(self._shadow, ChangeLog):
            if self._targets.is_cut[copy].any():
                launches.run()
                launches.held += self._only_own(changes, group, copy, rows, counts)
            reserved = self._shadow.reserve_all(params, counts, widths)
            if reserved is None:
                return  # the rest is counted all the same
            rows[:, 4], rows[:, 3], rows[:, 13] = reserved
            log_sums = self._shadow.sums_on_device()
        else:
            firsts = before(counts)
            size = int(counts.sum())
            offsets = torch.full((size,), -1, dtype=torch.int32, device=self._device)
            # A log that has grown too long is given up as it is noted.
            launches.held.append(offsets)
            rows[:, 4] = offsets.data_ptr() + 4 * firsts
            columns = firsts.tolist(), (firsts + counts).tolist(), widths.tolist()
            note(ChangedElements(offsets, tuple(map(Stretch, params, *columns))))
        rows[:, 5] = counts
        launches.held += changes.places, changes.bits
        index_bits = self._index_bits[copy]
        kinds = zip(widths.tolist(), index_bits.tolist(), strict=True)
        for width, num_bits in sorted(set(kinds)):
            own = (widths == width) & (index_bits == num_bits)
            num_programs = -(-counts[own] // kernels.BLOCK)

            def launch(
                table: torch.Tensor,
                owners: torch.Tensor,
                kind: tuple[int, int] = (width, num_bits),
            ) -> None:
                width, num_bits = kind
                sums = self._sums, width, log_sums
                kernels.write(table, owners, *sums, index_bits=num_bits)

            launches.add_programs(rows[own], 6, num_programs, launch)

    def warm_long(self, width: int) -> None:
        """Compile the kernel for tensors from MOST_SHORT elements on: none is written.

        Args:
            width: bytes of an element.

        """
        from vllm.inflight.worker.delta import triton_kernels as kernels

        is_logged = isinstance(self._shadow, ChangeLog)
        row = torch.zeros(kernels.COLUMNS, dtype=torch.int64, device=self._device)
        owner = torch.zeros(1, dtype=torch.int32, device=self._device)
        sums = self._sums, width, row[:LOG_SUMS] if is_logged else None
        kernels.write(row.clone(), owner, *sums, index_bits=64)

    def _only_own(
        self,
        changes: DecodedPart,
        group: Table,
        copy: Table,
        rows: Table,
        counts: Table,
    ) -> list[torch.Tensor]:
        """Leave out of rows and counts what other ranks serve.

        A shadow parameter is written where an element is, and nowhere else. The log
        shall hold no elements of other ranks.

        Args:
            changes: of one part.
            group: for each row, its number in `changes`.
            copy: for each row, the number of its copy.
            rows: of the kernel.
            counts: elements of each row.

        Returns:
            the memory that the rows refer to.

        """
        held: list[torch.Tensor] = []
        cut = np.flatnonzero(self._targets.is_cut[copy]).tolist()
        groups = list(changes)
        for row in cut:
            copied, own = self._targets.copies[copy[row]], groups[group[row]]
            _, is_here = follow(own.places, copied.part, copied.view)
            (chosen,) = is_here.nonzero(as_tuple=True)
            places, bits = own.places[chosen], own.bits[chosen]
            rows[row, 0], rows[row, 1] = places.data_ptr(), bits.data_ptr()
            counts[row] = len(chosen)
            held += [places, bits]
        return held

    def results(self, faults: Sequence[torch.Tensor] = ()) -> Table:
        """What the proof of the delta needs; the host waits once.

        Args:
            faults: of each part, `DecodedPart.fault`.

        Returns:
            for each tensor both halves of what its digest changes by, elements that
            become NaN or Inf, and elements written; int64 [tensors, SUMS].

        Raises:
            Malformed: the data of a part is malformed.

        """
        log = self._shadow if isinstance(self._shadow, ChangeLog) else None
        of_log = [] if log is None else [log.sums_on_device()]
        read = to_host(torch.cat([*faults, *of_log, self._sums.view(-1)])).numpy()
        require_no_fault(read[: len(faults)].tolist())
        found: Table = read[len(faults) :]
        if log is not None:
            log.know(found[:LOG_SUMS].tolist())
            found = found[LOG_SUMS:]
        return found.reshape(self._sums.shape)


def warm(
    device: torch.device, dtypes: set[torch.dtype], *, is_logged: bool = False
) -> None:
    """Compile the kernels for these dtypes now, and not while decoding.

    Args:
        device: of the parameters.
        dtypes: of the parameters.
        is_logged: whether changes go into the log of delta staging.

    """
    for width in {dtype.itemsize for dtype in dtypes}:
        # Changes that are far apart, which are coded as gaps, and one that is not; the
        # same in a matrix that is served turned, so that its places are divided; runs.
        changed: list[Any] = [np.s_[::512], np.s_[:], np.s_[::8, 0], np.s_[::8]]
        olds = [
            torch.zeros(shape, dtype=ops.INTEGERS[width], device="cpu")
            for shape in ((4096,), (1,), (64, 64), (64, 64))
        ]
        encoder, parts = Encoder(), list[Part]()
        for number, (old, at) in enumerate(zip(olds, changed, strict=True)):
            new = old.clone()
            new[at] = 1
            parts += encoder.add(number, old, new)
        (host,) = [*parts, *encoder.finish()]
        part = Part(host.table, host.data.to(device))
        part.check([old.numel() for old in olds], [width] * len(olds))
        live, shadow = (
            {str(number): old.t().to(device) for number, old in enumerate(olds)}
            for _ in ("live", "shadow")
        )
        log = ChangeLog(device, 1 << 12) if is_logged else None
        places = [own_place(*each) for each in enumerate(olds)]
        target = shadow if log is None else log
        writer = DeviceWriter(device, live, target, Targets.of(places))
        logs: list[ChangedElements] = []
        launches = Launches(device)
        changes = decode_unproved(part, launches=launches)
        writer.write(changes, logs.append, launches)
        writer.warm_long(width)
        sampler = Sampler(device=device)
        sampler.add([(str(number), old.to(device)) for number, old in enumerate(olds)])
        sizes = np.array([old.numel() for old in olds])
        names = [*map(str, range(len(olds)))]
        ChangedSamples(sampler.samples(), names, sizes).write(changes, launches)
        launches.run()
        require_sound([changes.fault])
        copy_elements(logs, live, shadow)
        writer.results()


def own_place(number: int, tensor: torch.Tensor) -> Destinations:
    """The places of a tensor that is served as a parameter of its own, turned around if
    it is a matrix."""
    part = 0, tuple(tensor.shape), tuple(tensor.stride())
    view = 0, tuple(tensor.shape), tuple(tensor.t().contiguous().t().stride())
    copied = Copied(str(number), view, part, tensor, is_exact=True)
    entry = Entry(tensor.shape, tensor.dtype, [copied], is_proved=True)
    places = Destinations.of(entry)
    assert places is not None
    return places


def copy_elements(logs: Sequence[ChangedElements], live: Params, shadow: Params) -> int:
    """Copy logged elements from live to shadow parameters, on their GPU.

    Args:
        logs: each has a launch of its own for each width of elements, so that kernels
            of decoding come in between.
        live: the served parameters.
        shadow: the shadow parameters.

    Returns:
        the bytes of these elements, in all ranks' parts.

    """
    from vllm.inflight.worker.delta import triton_kernels as kernels

    stretches = [stretch for log in logs for stretch in log.stretches]
    if not stretches:
        return 0
    params, *numbers = zip(*stretches, strict=True)
    firsts, ends, widths = (np.array(each, dtype=np.int64) for each in numbers)
    nums = [len(log.stretches) for log in logs]
    offsets = np.repeat([log.offsets.data_ptr() for log in logs], nums)
    rows = np.zeros((len(params), kernels.COPY_COLUMNS), dtype=np.int64)
    rows[:, 0], rows[:, 3] = offsets + 4 * firsts, ends - firsts
    rows[:, 1], rows[:, 2] = addresses(live, params), addresses(shadow, params)
    of_log = np.repeat(np.arange(len(logs)), nums)
    launches = Launches(logs[0].offsets.device)
    for number in range(len(logs)):
        for width in np.unique(widths[of_log == number]).tolist():
            own = rows[(of_log == number) & (widths == width)]
            launch = functools.partial(kernels.copy, width=width)
            launches.add_programs(own, 4, -(-own[:, 3] // kernels.BLOCK), launch)
    launches.run()
    return int(((ends - firsts) * widths).sum())
