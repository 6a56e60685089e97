"""The swap: a commit of delta staging exchanges logged elements with the live ones.

Addresses stay, so compiled graphs and CUDA graphs stay valid. Two swaps restore the
first state, so a rollback is the same swap once more.

The swap proves itself. It adds up what it takes out and what it puts in, and compares
the sum and the number of elements with those of the staging (change_log.py). If they
differ, it swaps back: something else has written into the live weights or the log.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np
import torch

from vllm.inflight import ops
from vllm.inflight.errors import ArenaTorn
from vllm.inflight.ops.launch_tables import LaunchTable
from vllm.inflight.worker.shadow.change_log import SUMS, ChangeLog
from vllm.inflight.worker.shadow.changed_elements import addresses, elements, reach
from vllm.inflight.worker.shadow.log_entries import LogEntries, Logged, Numbers

Found = tuple[ops.Digest, int]
"""What a swap has exchanged: the sum over the elements, and their number."""


class OtherBits(RuntimeError):
    """A swap met other bits than were staged, and was undone.

    Something else has written into the live weights or into the log.
    """


class Swap:
    """Exchanges the elements of a log with those of the live parameters.

    Args:
        log: of a staged update; nothing is added to it any more.
        live: the live parameters, by name.

    """

    def __init__(self, log: ChangeLog, live: Mapping[str, torch.Tensor]) -> None:
        self._device = log.device
        self._terms, self._num = log.expected()
        self._is_back = False
        """Whether the next swap brings the elements of the update out again."""
        self._live = {name: live[name] for name in sorted(log.entries.params)}
        self._addresses = addresses(self._live, self._live)
        self._take(log.entries)

    def _take(self, entries: LogEntries) -> None:
        self._held = entries.memory
        """Tensors at whose addresses the swap reads and writes, with `_live`."""
        self._swap: _OnHost | _OnDevice
        if self._device.type == "cuda":
            self._swap = _OnDevice(self._device, entries, self._live)
        else:
            self._swap = _OnHost(entries, self._live)

    def of(self, entries: LogEntries) -> Swap:
        """The same swap, of entries that have moved to other memory."""
        made = copy(self)
        made._take(entries)
        return made

    def __call__(self) -> float:
        """Exchange all elements, or none; returns the seconds it took.

        Raises:
            RuntimeError: a parameter has moved. Nothing has changed.
            OtherBits: other bits were exchanged than were staged. The swap was undone.
            ArenaTorn: some elements are exchanged, and were not exchanged back.

        """
        # Decoding waits for this: few steps of Python for hundreds of parameters.
        has_moved = addresses(self._live, self._live) != self._addresses
        if has_moved.any():
            name = list(self._live)[int(has_moved.argmax())]
            raise RuntimeError(f"{name} does not lie where it was compared")
        started = time.perf_counter()
        expected = ops.Digest.ZERO - self._terms if self._is_back else self._terms
        found, num = self._exchanged()
        if (found, num) != (expected, self._num):
            back = self._exchanged()
            if back != (ops.Digest.ZERO - found, num):
                raise ArenaTorn("a swap found other bits, and could not be undone")
            raise OtherBits(
                f"the swap met other bits than were staged ({num} elements of "
                f"{self._num}, sum {found.hex()} for {expected.hex()}), and was "
                "undone: something else has written into the live weights or the log"
            )
        self._is_back = not self._is_back
        return time.perf_counter() - started

    def _exchanged(self) -> Found:
        try:
            return self._swap()
        except BaseException as error:  # Ctrl-C, too: what is exchanged is not known
            if isinstance(error, ValueError) and isinstance(self._swap, _OnHost):
                raise  # of the check before the first element
            raise ArenaTorn(f"a swap broke off: {error!r}") from error


def _rows(
    entries: LogEntries, live: Mapping[str, torch.Tensor], columns: Sequence[int]
) -> Numbers:
    """The rows of a swap: one for each stretch of a parameter.

    Args:
        entries: of a log.
        live: the live parameters.
        columns: the columns of the result that get the address of the offsets, that of
            the bits, the number of elements, the number of the first one, bytes of an
            element, the address of the live parameter, and its reach.

    """
    params, found = entries.table(7)
    if params:
        names = list(dict.fromkeys(params))
        number = dict(zip(names, range(len(names)), strict=True))
        reaches = np.array([reach(live[name]) for name in names])
        found[:, 5] = addresses(live, params)
        found[:, 6] = reaches[[number[param] for param in params]]
    rows = np.zeros((len(params), 1 + max(columns)), dtype=np.int64)
    rows[:, list(columns)] = found
    return rows


class _OnHost:
    """One call of the native core."""

    def __init__(self, entries: LogEntries, live: Mapping[str, torch.Tensor]) -> None:
        self._rows = _rows(entries, live, (0, 1, 3, 5, 6, 2, 4))
        self._num = int(self._rows[:, 3].sum())

    def __call__(self) -> Found:
        table, num_rows = self._rows.ctypes.data, len(self._rows)
        sums = ops.native_core().swap_elements(table, num_rows)
        return ops.Digest(*sums), self._num


class _OnDevice:
    """One launch for each width of elements, on the current stream."""

    def __init__(
        self,
        device: torch.device,
        entries: LogEntries,
        live: Mapping[str, torch.Tensor],
    ) -> None:
        from vllm.inflight.worker.shadow.triton_kernels import BLOCK

        # The width comes last, and is no column of the kernel's.
        rows = _rows(entries, live, (0, 1, 3, 5, 7, 2, 6))
        widths = rows[:, 7]
        self._tables = []
        for width in np.unique(widths).tolist():
            own = np.ascontiguousarray(rows[widths == width, :7])
            num_programs = -(-own[:, 3] // BLOCK)
            self._tables.append((*LaunchTable.of(own, 4, num_programs, device), width))
        self._sums = torch.zeros(SUMS, dtype=torch.int64, device=device)
        if device.type == "cuda":
            # The tables are read on another stream, that of the steps.
            torch.cuda.current_stream(device).synchronize()

    def __call__(self) -> Found:
        from vllm.inflight.worker.shadow.triton_kernels import swap

        self._sums.zero_()
        for rows, owners, width in self._tables:
            swap(rows, owners, self._sums, width)
        # This waits until every element is exchanged.
        a, b, num = self._sums.tolist()
        return ops.Digest(a % 2**64, b % 2**64), num


def swap_reference(
    stretches: Sequence[Logged], live: Mapping[str, torch.Tensor]
) -> Found:
    """The same in plain torch."""
    terms, total = ops.Digest.ZERO, 0
    for param, width, offsets, bits, first in stretches:
        (here,) = (offsets >= 0).nonzero(as_tuple=True)
        at = offsets[here].to(torch.int64)
        held = elements(live[param], ops.INTEGERS[width])
        taken, put = held[at], bits[here]
        held[at], bits[here] = put, taken
        terms += ops.digest_of_changes(here + first, taken, put, width)
        total += len(at)
    return terms, total


def warm(device: torch.device, dtypes: set[torch.dtype]) -> None:
    """Compile the kernel for these dtypes now, and not while decoding."""
    for width in {dtype.itemsize for dtype in dtypes}:
        integer = ops.INTEGERS[width]
        log = ChangeLog(device, 1 << 10)
        live = {"": torch.zeros(8, dtype=integer, device=device)}
        offsets = torch.arange(4, device=device)
        log.add("", offsets, live[""][:4], offsets.to(integer))
        swap = Swap(log, live)
        swap()
        swap()
