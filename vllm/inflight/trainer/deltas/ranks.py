"""What the ranks of a trainer tell each other during an update, over torch's group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vllm.inflight.delta.part import Part
from vllm.inflight.errors import ConfigError


class TrainerRanks:
    """The default group of `torch.distributed`, whose rank 0 sends.

    Args:
        rank: of this process, as the init info has it; None: as torch has it.

    Raises:
        ConfigError: there is no such group, or this process has another rank in it.

    """

    def __init__(self, rank: int | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "delta_shards needs torch.distributed.init_process_group before: the "
                "ranks of the trainer bring their changes together in its group"
            )
        if rank not in (None, dist.get_rank()):
            raise ConfigError(
                f"with delta_shards, rank is that of torch's default group; it is "
                f"{dist.get_rank()} there, and {rank} in the init info"
            )
        self.number = dist.get_rank()
        self.is_first = self.number == 0
        self._size = dist.get_world_size()
        # A group of NCCL alone has no way for host memory.
        is_gpu = "cpu:" not in dist.get_backend_config()
        self._device = torch.device("cpu")
        if is_gpu:
            self._device = torch.device("cuda", torch.cuda.current_device())

    def gathered(self, value: Any) -> list[Any] | None:
        """The values of all ranks, on rank 0."""
        found = [None] * self._size if self.is_first else None
        dist.gather_object(value, found, dst=0)
        return found

    def told(self, value: Any = None) -> Any:
        """The value of rank 0, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gathered_parts(
        self,
        own: Sequence[Part],
        sizes: Sequence[Sequence[tuple[int, int]]],
        device: torch.device,
    ) -> list[list[Part]]:
        """The parts of all ranks, on rank 0; nothing but their bytes travels.

        Args:
            own: of this rank.
            sizes: on rank 0, of each rank, the bytes of its parts.
            device: where the parts are wanted.

        """
        if not self.is_first:
            for part in own:
                for tensor in (part.table, part.data):
                    if tensor.numel():
                        dist.send(tensor.to(self._device), 0)
            return []
        found = [list(own)]
        for rank in range(1, self._size):
            found.append([])
            for pair in sizes[rank]:
                halves = []
                for size in pair:
                    tensor = torch.empty(size, dtype=torch.uint8, device=self._device)
                    if size:
                        dist.recv(tensor, rank)
                    halves.append(tensor.to(device))
                found[rank].append(Part(*halves))
        return found
