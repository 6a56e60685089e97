"""A trainer's end of vLLM's `StatelessProcessGroup`, in a thread of its own.

OpenRLHF, ms-swift and PipelineRL open such a group and broadcast over NCCL beside it.
Here the group's store carries the tensors, so that it works on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from vllm.distributed.utils import StatelessProcessGroup

from tests.support.ports import free_port
from vllm.inflight.transport.waiting import in_background

HOST = "127.0.0.1"
BARRIER = "barrier"


class StoreTrainer:
    """A rank of a group with the workers; broadcasts what it is given, in order."""

    def __init__(self, world_size: int = 2, rank: int = 0) -> None:
        self.port = free_port()
        self._world_size, self._rank = world_size, rank
        self._tensors: SimpleQueue[torch.Tensor | str | None] = SimpleQueue()
        self._ended = in_background(self._run)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor when the ones before it have been sent."""
        self._tensors.put(tensor)

    def barrier(self) -> None:
        """Meet the workers when all tensors before have been sent."""
        self._tensors.put(BARRIER)

    def end(self) -> None:
        """Send nothing any more."""
        self._tensors.put(None)
        self._ended.result(timeout=60)

    def _run(self) -> None:
        group = StatelessProcessGroup.create(
            host=HOST, port=self.port, rank=self._rank, world_size=self._world_size
        )
        while (tensor := self._tensors.get()) is not None:
            if tensor is BARRIER:
                group.barrier()
            else:
                group.broadcast_obj(tensor, src=self._rank)


@contextmanager
def store_trainer() -> Iterator[StoreTrainer]:
    """A trainer that ends with the context; a worker has to join its group."""
    trainer = StoreTrainer()
    yield trainer
    trainer.end()
