"""Decoding a part on a GPU: a few launches, whatever the number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight.delta import reference
from vllm.inflight.delta.decoded import DecodedPart
from vllm.inflight.delta.part import CHUNK_CODES, OFFSETS, Part, PlaceForm, Rows
from vllm.inflight.ops.arriving import to_host
from vllm.inflight.ops.launch_tables import Table, owners_of

Launch = Callable[..., None]
"""Launches a kernel, given its table and maybe the row of each program."""


class Launches:
    """Launches of kernels whose tables travel to the GPU in one copy.

    A call of the driver takes longer than to fill the memory. And at each call of torch
    another thread may take the interpreter's lock.

    Args:
        device: the GPU.

    Attributes:
        held: memory that the tables refer to, kept until the launches are run. Later
            work of the same stream alone gets it then. Whoever adds a table adds its
            memory: what is freed before is given to the tables themselves.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held: list[torch.Tensor] = []
        self._tables: list[Table] = []
        self._owners: list[NDArray[np.int32]] = []
        self._launches: list[tuple[Launch, bool]] = []
        """Each launch, and whether it takes the row of each program."""

    def add(self, table: Table, launch: Launch) -> None:
        """Add a launch that takes a table; `launch` gets it on the GPU, and flat."""
        self._tables.append(table.reshape(-1))
        self._launches.append((launch, False))

    def add_programs(
        self, table: Table, column: int, counts: Table, launch: Launch
    ) -> None:
        """Add a launch of several programs for each row of a table.

        Args:
            table: its `column` gets the number of each row's first program.
            column: of the first program.
            counts: programs of each row.
            launch: gets the table on the GPU, flat, and the row of each program; int32.

        """
        self._owners.append(owners_of(table, column, counts))
        self._tables.append(table.reshape(-1))
        self._launches.append((launch, True))

    def run(self) -> None:
        """Copy the tables, and launch what was added, in its order.

        The host does not wait for what the GPU does before.
        """
        launches, self._launches = self._launches, []
        if not launches:
            return
        tables, self._tables = self._tables, []
        owners, self._owners = self._owners, []
        sizes = [len(table) for table in tables]
        num, programs = sum(sizes), [len(each) for each in owners]
        num_words = num + -(-sum(programs) // 2)
        is_pinned = self._device.type != "cpu"
        host = torch.empty(
            num_words, dtype=torch.int64, device="cpu", pin_memory=is_pinned
        )
        words = host.numpy()
        np.concatenate(tables, out=words[:num])
        if owners:
            own = words[num:].view(np.int32)
            np.concatenate(owners, out=own[: sum(programs)])
        here = host.to(self._device, non_blocking=True) if is_pinned else host
        *on_device, rest = torch.split_with_sizes(here, [*sizes, num_words - num])
        # The last element is one too many where the number of programs is odd.
        programs.append(2 * (num_words - num) - sum(programs))
        rows_of = iter(torch.split_with_sizes(rest.view(torch.int32), programs))
        for (launch, takes_owners), table in zip(launches, on_device, strict=True):
            launch(table, next(rows_of)) if takes_owners else launch(table)
        self.held.clear()


class Joined(NamedTuple):
    """The blocks of several parts in one table."""

    rows: Rows
    """Of all parts. Their offsets count from `data`, and may lie behind its end."""
    numbers: Table
    """Of each row, its number in its part."""
    data: torch.Tensor
    """Of one part: the data of the others lies at higher addresses."""

    @classmethod
    def of(cls, parts: Sequence[Part], launches: Launches) -> Joined:
        """Join the tables of checked parts.

        Args:
            parts: with their data on one device.
            launches: hold the data until they are run.

        """
        found = [_aligned(part.plain_data()) for part in parts]
        launches.held += found
        first = min(found, key=torch.Tensor.data_ptr)
        rows = np.concatenate([part.rows for part in parts])
        nums = [len(part.rows) for part in parts]
        beyond = [data.data_ptr() - first.data_ptr() for data in found]
        shift = np.repeat(np.array(beyond, dtype=np.uint64), nums)
        for name in OFFSETS:
            rows[name] += shift
        return cls(rows, np.concatenate([np.arange(num) for num in nums]), first)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """Data of a part at an address that kernels can read words from."""
    return data.clone() if data.data_ptr() % 8 else data


def bytes_of_copy(part: Part) -> int:
    """Bytes of the copy of a part's data that `Joined` makes on the GPU, if any."""
    if (plain_bytes := part.plain_bytes) is not None:
        return plain_bytes
    return part.data.numel() if part.data.data_ptr() % 8 else 0


def decode_rows(joined: Joined, decoded: DecodedPart, launches: Launches) -> None:
    """Decode the blocks of checked tables, when the launches are run.

    Args:
        joined: the tables, and where their data is.
        decoded: made of the groups of these tables. It gets the fault before the launch
            that writes it.
        launches: the decoding is added to them, and holds the memory of `decoded`.

    """
    from vllm.inflight.delta import triton_kernels as kernels

    rows, numbers, data = joined
    launches.held += decoded.places, decoded.bits
    place_bytes = decoded.places.element_size()

    def begin(fault: torch.Tensor) -> None:
        decoded.fault = fault

    launches.add(np.array([kernels.NO_FAULT], dtype=np.int64), begin)
    table = _table(rows, numbers, decoded.row_addresses)
    is_gaps = rows["form"] <= PlaceForm.GAPS16
    for width in np.unique(rows["width"]).tolist():
        own = rows["width"] == width
        if (gaps := own & is_gaps).any():

            def of_gaps(
                on_device: torch.Tensor, owners: torch.Tensor, width: int = width
            ) -> None:
                assert decoded.fault is not None
                arguments = data, decoded.fault, width, CHUNK_CODES
                kernels.decode_gaps(
                    on_device, owners, *arguments, place_bytes=place_bytes
                )

            chunks = -(-rows["num_codes"][gaps].astype(np.int64) // CHUNK_CODES)
            launches.add_programs(table[gaps], 12, chunks, of_gaps)
        if (others := own & ~is_gaps).any():

            def of_others(
                on_device: torch.Tensor, owners: torch.Tensor, width: int = width
            ) -> None:
                assert decoded.fault is not None
                arguments = data, decoded.fault, width
                kernels.decode_others(
                    on_device, owners, *arguments, place_bytes=place_bytes
                )

            is_bitmap = rows["form"][others] == PlaceForm.BITMAP
            sizes = np.where(is_bitmap, rows["num_elements"][others], 1)
            sizes = np.maximum(sizes, rows["num_entries"][others]).astype(np.int64)
            counts = -(-sizes // kernels.SPAN)
            launches.add_programs(table[others], 12, counts, of_others)
    if (runs := rows["form"] == PlaceForm.RUNS).any():

        def of_runs(on_device: torch.Tensor) -> None:
            assert decoded.fault is not None
            kernels.decode_runs(on_device, data, decoded.fault, place_bytes=place_bytes)

        # One program for each block: runs are few.
        launches.add(table[runs], of_runs)


def require_none(faults: Sequence[torch.Tensor]) -> None:
    """Raise `Malformed` for the first part with a fault; the host waits once.

    Args:
        faults: of each part, `DecodedPart.fault`.

    """
    require_no_fault(to_host(torch.cat(list(faults))).tolist())


def require_no_fault(numbers: Iterable[int]) -> None:
    """The same, of what was read from the GPU."""
    from vllm.inflight.delta.triton_kernels import fault_of

    for found in map(fault_of, numbers):
        reference.demand(found is None, *(found or (0, "")))


def _table(rows: Rows, numbers: Table, addresses: Table) -> Table:
    """The rows as the kernels read them."""
    from vllm.inflight.delta.triton_kernels import COLUMNS

    table = np.zeros((len(rows), COLUMNS), dtype=np.int64)
    table[:, 0] = numbers
    names = ("first", "num_elements", "num_entries", "num_exceptions", "num_codes")
    for column, name in enumerate(names, 1):
        table[:, column] = rows[name]
    # The bytes of a code of gaps are the number of the form; of other forms, the form.
    table[:, 6], table[:, 7] = rows["form"], rows["code_bytes"]
    for column, name in enumerate(OFFSETS, 8):
        table[:, column] = rows[name]
    table[:, 13:15] = addresses
    return table
