"""Tables of launches: what each program of a kernel is for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Table = NDArray[np.int64]


class LaunchTable(NamedTuple):
    """A table on a GPU, for a launch of several programs for each of its rows.

    Both tensors lie in one piece of memory.
    """

    rows: torch.Tensor
    """int64, as the table was given."""
    owners: torch.Tensor
    """The row of each program; int32."""

    @classmethod
    def of(
        cls, table: Table, column: int, counts: Table, device: torch.device
    ) -> LaunchTable:
        """Copy a table to the GPU.

        Args:
            table: its `column` gets the number of each row's first program.
            column: of the first program.
            counts: programs of each row.
            device: the GPU.

        """
        owners = owners_of(table, column, counts)
        # One copy for both: a call of the driver takes longer than to fill the memory.
        both = np.zeros(table.size + -(-len(owners) // 2), dtype=np.int64)
        both[: table.size] = table.ravel()
        both[table.size :].view(np.int32)[: len(owners)] = owners
        on_device = to_device(both, device)
        rest = on_device[table.size :].view(torch.int32)
        return cls(on_device[: table.size].view(table.shape), rest[: len(owners)])


def owners_of(table: Table, column: int, counts: Table) -> NDArray[np.int32]:
    """The row of each program; `column` of the table gets each row's first one."""
    table[:, column] = np.cumsum(counts) - counts
    return np.repeat(np.arange(len(table), dtype=np.int32), counts)


def to_device(table: Table, device: torch.device) -> torch.Tensor:
    """A table on the GPU; the host does not wait for what the GPU does before."""
    made = torch.from_numpy(np.ascontiguousarray(table, dtype=np.int64))
    if device.type == "cpu":
        return made
    return made.pin_memory().to(device, non_blocking=True)
