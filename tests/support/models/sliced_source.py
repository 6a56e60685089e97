"""A tensor-parallel trainer's weights: of every tensor the slices of its ranks."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta

from tests.support.models.checkpoint_source import CheckpointSource
from vllm.inflight.releases.table import adapter
from vllm.inflight.transport.buckets.tensor_slices import Shard
from vllm.inflight.transport.collective.trainer_engine import ShardMeta

Entry = tuple[str, torch.Tensor, Shard | None]

ROWS = ("o_proj.weight", "down_proj.weight")
"""Row-parallel matrices are cut by columns, all others by rows; ranks share norms."""


def slices(
    name: str, whole: torch.Tensor, dim: int, ends: list[int], ranks: bool = False
) -> list[Entry]:
    """A tensor cut at `ends`, a part for each rank."""
    size = whole.shape[dim]
    return [
        (
            name,
            whole.narrow(dim, start, end - start).contiguous(),
            Shard(dim=dim, start=start, size=size, rank=rank if ranks else None),
        )
        for rank, (start, end) in enumerate(pairwise([0, *ends, size]))
    ]


_Source: Any = adapter("weight source")


class SlicedSource(_Source):
    """The tensors of a folder, cut for some ranks; `entries` may be changed.

    Args:
        folder: of the checkpoint.
        num_ranks: of the trainer.
        are_told: whether the slices are said to be of the engine's ranks.

    """

    def __init__(self, folder: Path, num_ranks: int, *, are_told: bool = True) -> None:
        self.entries: list[Entry] = []
        for name, whole in CheckpointSource(folder).tensors.items():
            if whole.dim() == 1 and are_told:
                size = len(whole)
                self.entries += [
                    (name, whole, Shard(dim=0, start=0, size=size, rank=rank))
                    for rank in range(num_ranks)
                ]
                continue
            dim = int(name.endswith(ROWS))
            size = whole.shape[dim]
            ends = [size * rank // num_ranks for rank in range(1, num_ranks)]
            self.entries += slices(name, whole, dim, ends, are_told)

    def read_facts(self) -> list[ParamMeta]:
        return [
            ShardMeta(name, tensor.dtype, tensor.shape, shard)
            for name, tensor, shard in self.entries
        ]

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor, _ in self.entries)
