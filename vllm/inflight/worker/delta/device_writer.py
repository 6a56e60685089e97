"""Writing a delta on a GPU: tables for the kernels, and what they found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from vllm.inflight import ops
from vllm.inflight.delta import Encoder, Part
from vllm.inflight.delta.decode import require_sound
from vllm.inflight.delta.decoded import DecodedPart, Groups, before
from vllm.inflight.delta.device_decode import (
    Joined,
    Launches,
    bytes_of_copy,
    decode_rows,
    require_no_fault,
)
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.ops.launch_tables import Table
from vllm.inflight.worker.delta.changed_samples import ChangedSamples
from vllm.inflight.worker.delta.destinations import Destinations, follow
from vllm.inflight.worker.delta.targets import Bools, Targets
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


ROOM_TO_WARM = 1 << 14
"""Bytes of the log that `warm` writes into; a part of 8-byte elements takes 6.2 KiB."""


class DeviceWriter:
    """Writes the changes of a delta, a part at a time.

    Args:
        device: of the parameters.
        live: the served parameters.
        shadow: the shadow parameters, or the log that stands for them.
        targets: what the tensors of the delta are written into.
        samples: of the version that the delta leads to; None if they are not known.
        are_long: whether the tensors are written as if one had MOST_SHORT elements.

    """

    def __init__(
        self,
        device: torch.device,
        live: Params,
        shadow: Params | ChangeLog,
        targets: Targets,
        samples: ChangedSamples | None = None,
        *,
        are_long: bool = False,
    ) -> None:
        from vllm.inflight.worker.delta.triton_kernels import COLUMNS, SUMS

        self._device, self._shadow, self._targets = device, shadow, targets
        self._samples = samples
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
        has_long = are_long or bool((tensors[:, 0] >= MOST_SHORT).any())
        self._index_bits = np.where(targets.are_flat, 0, 64 if has_long else 32)
        shape = len(tensors), SUMS
        self._sums = torch.zeros(shape, dtype=torch.int64, device=device)
        self._place_dtype = torch.int64 if has_long else torch.int32
        # Offsets, which stay where places were, have 32 bits.
        self._is_direct = (tensors[:, 3] == 1) & (not has_long)
        alone = np.flatnonzero(self._is_direct)
        self._is_direct[alone] = ~targets.is_cut[tensors[alone, 4]]

    def batches(self, parts: Sequence[Part], most: int) -> Iterator[Sequence[Part]]:
        """Parts that are written together.

        Args:
            parts: checked, in their order, on the GPU.
            most: bytes that several of them may take, beside what stays.

        """
        together: list[Part] = []
        room = logged = 0
        for part in parts:
            taken, in_log = self._room_for(part, logged)
            if together and taken > room:
                yield together
                together, logged = [], 0
                taken, in_log = self._room_for(part, 0)
            if not together:
                room = most
            together.append(part)
            room, logged = room - taken, logged + in_log
        if together:
            yield together

    def _room_for(self, part: Part, logged: int) -> tuple[int, int]:
        """Bytes that a part takes on the GPU until it is written, and in the log.

        Args:
            part: checked.
            logged: bytes in the log of parts that are written together with it.

        """
        rows = part.rows
        numbers, entries = rows["number"], rows["num_entries"].astype(np.int64)
        widths = rows["width"].astype(np.int64)
        is_direct = self._is_direct[numbers]
        taken, in_log = bytes_of_copy(part), 0
        if self._log is None:
            # The offsets may be given up as soon as they are noted.
            taken += int(entries @ (4 * self._targets.tensors[numbers, 3] + widths))
            widths = np.zeros_like(widths)
        else:
            in_log = int(entries @ ((4 + widths) * is_direct))
            if logged + in_log > self._log.room_beside_weights:
                in_log, is_direct = 0, np.zeros_like(is_direct)
        sizes = (self._place_dtype.itemsize + widths) * ~is_direct
        return taken + int(entries @ sizes), in_log

    def write(
        self,
        parts: Sequence[Part],
        note: Callable[[ChangedElements], None],
        launches: Launches,
    ) -> DecodedPart | None:
        """Write the changes of parts into the shadow parameters, or into the log.

        Where all of a tensor is served, and once, the places are decoded to where their
        offsets stay: in the elements that are noted, or in the log beside the weights.
        The bits are as well, in the log.

        Args:
            parts: checked, in their order, on the GPU.
            note: called with the places of the elements, before the first is written
                into a shadow parameter.
            launches: the changes are decoded and written when these are run. Where a
                tensor is cut over ranks, a log needs the places before: they are run
                here then.

        Returns:
            the changes as they are decoded; None if the log has no room for them.

        """
        groups = Groups(np.concatenate([part.rows for part in parts]))
        copy, group = self._targets.copies_of(groups.numbers)
        rows, is_direct = self._rows[copy], self._is_direct[groups.numbers[group]]
        rows[:, 5], widths = groups.counts[group], groups.widths[group]
        rows[:, 8] = groups.are_differences[group]
        given = np.zeros((len(groups), 2), dtype=np.int64)
        if (log := self._log) is None:
            self._note(rows, copy, widths, note, launches)
            given[group[is_direct], 0] = rows[is_direct, 4]
        elif self._reserve(log, rows, copy, widths, is_direct):
            # To read and to write host memory once more would take long.
            is_here = is_direct & log.are_beside_weights(rows[:, 4])
            given[group[is_here]] = rows[is_here][:, [4, 3]]
        else:
            # The rest is counted all the same, for the error.
            rows[:, 5] = self._most_served(copy, rows[:, 5])
            self._reserve(log, rows, copy, widths, ~is_direct)
            return None
        joined = Joined.of(parts, launches)
        changes = DecodedPart(groups, self._device, self._place_dtype, given)
        decode_rows(joined, changes, launches)
        if self._samples is not None:
            self._samples.write(changes, launches)
        rows[:, :2] = changes.addresses[group]
        if log is not None and not is_direct.all():
            if self._targets.is_cut[copy].any():
                launches.run()
                launches.held += self._only_own(changes, group, copy, rows)
                launches.held += changes.places, changes.bits
            if not self._reserve(log, rows, copy, widths, ~is_direct):
                return changes
        self._launch(rows, widths, self._index_bits[copy], launches)
        return changes

    @property
    def _log(self) -> ChangeLog | None:
        return self._shadow if isinstance(self._shadow, ChangeLog) else None

    def _note(
        self,
        rows: Table,
        copy: Table,
        widths: Table,
        note: Callable[[ChangedElements], None],
        launches: Launches,
    ) -> None:
        """Note the elements of these rows, which get the addresses of their offsets."""
        firsts, counts = before(rows[:, 5]), rows[:, 5]
        size = int(counts.sum())
        offsets = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        # A log that has grown too long is given up as it is noted.
        launches.held.append(offsets)
        rows[:, 4] = offsets.data_ptr() + 4 * firsts
        columns = firsts.tolist(), (firsts + counts).tolist(), widths.tolist()
        params = map(self._targets.params.__getitem__, copy.tolist())
        note(ChangedElements(offsets, tuple(map(Stretch, params, *columns))))

    def _reserve(
        self, log: ChangeLog, rows: Table, copy: Table, widths: Table, chosen: Bools
    ) -> bool:
        """Reserve room in the log for the chosen rows; returns whether it has some.

        The rows get the addresses, and the number of their first element.
        """
        if chosen.any():
            params = [self._targets.params[number] for number in copy[chosen].tolist()]
            reserved = log.reserve_all(params, rows[chosen, 5], widths[chosen])
            if reserved is not None:
                rows[chosen, 4], rows[chosen, 3], rows[chosen, 13] = reserved
        return log.has_room

    def _most_served(self, copy: Table, counts: Table) -> Table:
        """The most of so many changes of tensors that these copies may serve."""
        parts = [self._targets.copies[number].part[1] for number in copy.tolist()]
        num_served = np.array([prod(shape) for shape in parts], dtype=np.int64)
        return np.minimum(counts, num_served)

    def _launch(
        self, rows: Table, widths: Table, index_bits: Table, launches: Launches
    ) -> None:
        """Write the changes of these rows when the launches are run."""
        from vllm.inflight.worker.delta import triton_kernels as kernels

        log_sums = None if self._log is None else self._log.sums_on_device()
        place_bytes = self._place_dtype.itemsize
        kinds = zip(widths.tolist(), index_bits.tolist(), strict=True)
        for width, num_bits in sorted(set(kinds)):
            own = rows[(widths == width) & (index_bits == num_bits)]

            def launch(
                table: torch.Tensor,
                owners: torch.Tensor,
                kind: tuple[int, int] = (width, num_bits),
            ) -> None:
                width, num_bits = kind
                sizes = {"place_bytes": place_bytes, "index_bits": num_bits}
                kernels.write(table, owners, self._sums, width, log_sums, **sizes)

            launches.add_programs(own, 6, -(-own[:, 5] // kernels.BLOCK), launch)

    def _only_own(
        self, changes: DecodedPart, group: Table, copy: Table, rows: Table
    ) -> list[torch.Tensor]:
        """Leave out of rows what other ranks serve.

        A shadow parameter is written where an element is, and nowhere else. The log
        shall hold no elements of other ranks.

        Args:
            changes: decoded.
            group: for each row, its number in `changes`.
            copy: for each row, the number of its copy.
            rows: of the kernel.

        Returns:
            the memory that the rows refer to.

        """
        held: list[torch.Tensor] = []
        for row in np.flatnonzero(self._targets.is_cut[copy]).tolist():
            copied = self._targets.copies[copy[row]]
            own = changes.changes_of(group[row])
            _, is_here = follow(own.places, copied.part, copied.view)
            (chosen,) = is_here.nonzero(as_tuple=True)
            places, bits = own.places[chosen], own.bits[chosen]
            rows[row, 0], rows[row, 1] = places.data_ptr(), bits.data_ptr()
            rows[row, 5] = len(chosen)
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
        log = self._log
        of_log = [] if log is None else [log.sums_on_device()]
        read = to_host(torch.cat([*faults, *of_log, self._sums.view(-1)])).numpy()
        require_no_fault(read[: len(faults)].tolist())
        found: Table = read[len(faults) :]
        if log is not None:
            log.know(found[:LOG_SUMS].tolist())
            found = found[LOG_SUMS:]
        return found.reshape(self._sums.shape)


def warm(
    device: torch.device,
    dtypes: set[torch.dtype],
    *,
    is_logged: bool = False,
    has_long: bool = False,
) -> None:
    """Compile the kernels for these dtypes now, and not while decoding.

    Args:
        device: of the parameters.
        dtypes: of the parameters.
        is_logged: whether changes go into the log of delta staging.
        has_long: whether a tensor of the checkpoint has MOST_SHORT elements or more.

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
        places = [own_place(*each) for each in enumerate(olds)]
        sampler = Sampler(device=device)
        sampler.add([(str(number), old.to(device)) for number, old in enumerate(olds)])
        sizes = np.array([old.numel() for old in olds])
        names = [*map(str, range(len(olds)))]
        samples = ChangedSamples(sampler.samples(), names, sizes)
        for are_long in {False, has_long}:
            log = ChangeLog(device, ROOM_TO_WARM) if is_logged else None
            writer = DeviceWriter(
                *(device, live, shadow if log is None else log, Targets.of(places)),
                samples,
                are_long=are_long,
            )
            logs: list[ChangedElements] = []
            launches = Launches(device)
            changes = writer.write([part], logs.append, launches)
            launches.run()
            assert changes is not None
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
