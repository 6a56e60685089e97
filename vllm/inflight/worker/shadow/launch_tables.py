"""Tables for kernels that do many pieces of work in one launch."""

from __future__ import annotations

import torch


def owners_of(
    table: list[list[int]], count: int, first: int, block: int, device: torch.device
) -> torch.Tensor:
    """The row of each program; notes in each row the number of its first program.

    Args:
        table: the rows.
        count: the column of the number of elements.
        first: the column of the first program.
        block: elements that a program takes.
        device: of the result.

    """
    num_programs, counts = 0, []
    for row in table:
        row[first] = num_programs
        counts.append(-(-row[count] // block))
        num_programs += counts[-1]
    # Made on the host: the staging thread's default device is its GPU.
    with torch.device("cpu"):
        owners = torch.arange(len(table), dtype=torch.int32)
        owners = owners.repeat_interleave(torch.tensor(counts))
    return owners.to(device)


def table_of(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    """The rows as int64 on a device."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
