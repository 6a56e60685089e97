"""Decoding a part on a GPU: two launches, whatever the number of blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight.delta import reference
from vllm.inflight.delta.part import CHUNK_CODES, PlaceForm, Rows

Table = NDArray[np.int64]


def decode_rows(
    rows: Rows,
    data: torch.Tensor,
    slots: Table,
    places: torch.Tensor,
    bits: torch.Tensor,
) -> torch.Tensor:
    """Decode the blocks of a checked table, and do not wait for it.

    Args:
        rows: the rows of the table.
        data: data of the part.
        slots: for each row its first place in `places` and its first byte in `bits`.
        places: gets the places; int64.
        bits: gets the bits; uint8.

    Returns:
        what `require_none` reads: int64 on the GPU.

    """
    from vllm.inflight.delta import triton_kernels as kernels

    if data.data_ptr() % 8:
        data = data.clone()
    fault = torch.full((1,), kernels.NO_FAULT, dtype=torch.int64, device=data.device)
    table = _table(rows, slots)
    is_gaps = rows["form"] <= PlaceForm.GAPS16
    for width in np.unique(rows["width"]).tolist():
        own = rows["width"] == width
        arguments = data, places, bits, fault, width
        if (gaps := own & is_gaps).any():
            chunks = -(-rows["num_codes"][gaps].astype(np.int64) // CHUNK_CODES)
            on_device, owners = launch_table(table[gaps], 12, chunks, data.device)
            kernels.decode_gaps(on_device, owners, *arguments, CHUNK_CODES)
        if (others := own & ~is_gaps).any():
            # One program for each block: they are few, or small.
            kernels.decode_others(to_device(table[others], data.device), *arguments)
    return fault


def require_none(faults: Sequence[torch.Tensor]) -> None:
    """Raise `Malformed` for the first part with a fault; the host waits once.

    Args:
        faults: of each part, what `decode_rows` returned.

    """
    from vllm.inflight.delta.triton_kernels import fault_of

    for found in map(fault_of, torch.cat(list(faults)).tolist()):
        reference.demand(found is None, *(found or (0, "")))


def _table(rows: Rows, slots: Table) -> Table:
    """The rows as the kernels read them."""
    from vllm.inflight.delta.triton_kernels import COLUMNS

    table = np.zeros((len(rows), COLUMNS), dtype=np.int64)
    table[:, 0] = np.arange(len(rows))
    names = ("first", "num_elements", "num_entries", "num_exceptions", "num_codes")
    for column, name in enumerate(names, 1):
        table[:, column] = rows[name]
    # The bytes of a code of gaps are the number of the form; of other forms, the form.
    table[:, 6], table[:, 7] = rows["form"], rows["code_bytes"]
    for column, name in enumerate(
        ("chunks_at", "places_at", "values_at", "exceptions_at"), 8
    ):
        table[:, column] = rows[name]
    table[:, 13:15] = slots
    return table


def launch_table(
    table: Table, column: int, counts: Table, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A table on the GPU, and the row of each program of a launch; int32.

    Args:
        table: its `column` gets the number of each row's first program.
        column: of the first program.
        counts: programs of each row.
        device: the GPU.

    """
    table[:, column] = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(len(table), dtype=np.int32), counts)
    # One copy for both: a call of the driver takes longer than to fill the memory.
    both = np.zeros(table.size + -(-len(owners) // 2), dtype=np.int64)
    both[: table.size] = table.ravel()
    both[table.size :].view(np.int32)[: len(owners)] = owners
    on_device = to_device(both, device)
    rest = on_device[table.size :].view(torch.int32)
    return on_device[: table.size].view(table.shape), rest[: len(owners)]


def to_device(table: Table, device: torch.device) -> torch.Tensor:
    """A table on the GPU; the host does not wait for what the GPU does before."""
    made = torch.from_numpy(np.ascontiguousarray(table, dtype=np.int64))
    if device.type == "cpu":
        return made
    return made.pin_memory().to(device, non_blocking=True)
