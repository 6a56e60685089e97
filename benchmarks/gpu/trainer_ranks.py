"""The ranks of a trainer that shares its weights out with FSDP2, a process each.

Rank 0 is the process that the arm has started. It starts the others, and tells them
each command before it carries it out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from vllm.inflight.transport.weight_source import Weights

STORE = "BENCH_TRAINER_STORE"
"""In the environment: the file by which the ranks meet."""
RANK = "BENCH_TRAINER_RANK"
"""In the environment: which rank a process is."""
PATIENCE = timedelta(hours=1)
"""Other ranks wait for rank 0 while the engine starts, and between two updates."""
FILE_BYTES = 4 << 30
"""Bytes of a file of a checkpoint, all of which rank 0 has in host memory."""


class Ranks:
    """All ranks, as one of them sees them.

    Args:
        size: how many there are.
        backend: of the trainer, passed on to those that are started.
        folder: of the shape.
        device: of this rank.

    """

    def __init__(
        self, size: int, backend: str, folder: str, device: torch.device
    ) -> None:
        self.number = int(os.environ.get(RANK, 0))
        if device.type == "cpu":
            torch.set_num_threads(1)
        store = os.environ.get(STORE) or f"{folder}/trainer-{os.getpid()}"
        # They are in the session of this process, and end with it.
        self._others = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.trainer", backend, folder, "-1"],
                env=os.environ | {RANK: str(rank), STORE: store},
            )
            for rank in range(1, size if self.number == 0 else 1)
        ]
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=self.number,
            world_size=size,
            timeout=PATIENCE,
        )

    def told(self, command: Any = None) -> Any:
        """What rank 0 says, on every rank."""
        box = [command]
        dist.broadcast_object_list(box, src=0)
        return box[0]


class ShardedWeights(Weights):
    """A model in bf16 under FSDP2; each rank draws its own shards."""

    def __init__(self, folder: str, device: torch.device) -> None:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device=device)
        torch.manual_seed(dist.get_rank())
        self.own: dict[str, torch.Tensor] = {}
        """Name → the shard of this rank."""
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            self.own[name] = param.detach().to_local().normal_(0, 0.02)
        super().__init__(model)

    def save(self, folder: str) -> None:
        """Write the checkpoint; rank 0 writes what all have. Collective."""
        for number, tensors in enumerate(self._files()):
            if dist.get_rank() == 0:
                save_file(tensors, Path(folder, f"model-{number:05}.safetensors"))

    def _files(self) -> Iterator[dict[str, torch.Tensor]]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.read_tensors():
            found[name] = tensor.cpu()
            if sum(each.nbytes for each in found.values()) >= FILE_BYTES:
                yield found
                found = {}
        yield found
