"""A trainer of several ranks, each in a process of its own with its shards alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.gpu.trainer import Client
from tests.support.engines.far_trainer import FarTrainer, init_info
from tests.support.ports import free_port
from tests.support.preloaded_process import nursery
from tests.support.transports.peers import HOST
from vllm.inflight.errors import InflightError
from vllm.inflight.transport.weight_source import Weights

BY_COLUMN = "o_proj", "down_proj"
"""Cut along dimension 1, as row-parallel layers are."""


def run(
    pipe: Any,
    rank: int,
    size: int,
    folder: str,
    backend: str,
    group: str,
    common: dict[str, Any],
) -> None:
    """The process of one rank: joins, then sends what it is told to."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    device = torch.device("cpu")
    if backend != "inflight_gloo":
        # The engine has the first GPU, or shares the only one.
        device = torch.device("cuda", torch.cuda.device_count() - 1 - rank)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # else the mesh would choose another one
    place = {"rank": rank, "world_size": size}
    dist.init_process_group(group, init_method=common.pop("store"), **place)
    mesh = init_device_mesh(device.type, (size,))

    def shards(of: str) -> dict[str, torch.Tensor]:
        return {
            name: distribute_tensor(
                tensor.to(device),
                mesh,
                [Shard(int(any(one in name for one in BY_COLUMN)))],
            )
            for name, tensor in load_file(Path(of, "model.safetensors")).items()
        }

    kept = shards(folder)
    common |= {"rank": rank, "delta": "always", "delta_shards": True}
    info = init_info(backend, common)
    client = Client(pipe) if rank == 0 else None
    engine = WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=Weights(kept)
    )
    pipe.send(("done", None))
    while True:
        for name, tensor in shards(pipe.recv()[0]).items():
            kept[name].to_local().copy_(tensor.to_local())
        try:
            engine.send_weights()
        except InflightError as error:
            pipe.send(("failed", error))
            continue
        pipe.send(("done", engine.deltas.last))


class FarRanks(FarTrainer):
    """The test's end of it; `with` ends all of the processes.

    Args:
        llm: the engine that takes its weights, in this process.
        folder: the first checkpoint that the ranks have.
        store: a file by which they meet.
        size: how many there are; on GPUs, each has one of its own.
        backend: `inflight_gloo`, `inflight_nccl` or `inflight_ipc`.
        group: what torch's group of the ranks is made of.
        num_workers: of the engine.

    """

    def __init__(
        self,
        llm: Any,
        folder: Path,
        store: Path,
        size: int,
        backend: str = "inflight_gloo",
        group: str = "gloo",
        num_workers: int = 1,
    ) -> None:
        self._llm, self.silent = llm, nursery.Event()
        common: dict[str, Any] = {"store": f"file://{store}", "bucket_bytes": 1 << 16}
        if not backend.endswith("ipc"):
            common |= {"master_address": HOST, "master_port": free_port()}
            common["world_size"] = 1 + num_workers
        self._pipes, self._processes = [], []
        for rank in range(size):
            pipe, theirs = nursery.Pipe()
            arguments = theirs, rank, size, str(folder), backend, group, common
            process = nursery.Process(target=run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        self._pipe = self._pipes[0]

    def send(self, folder: Path) -> Any:
        for pipe in self._pipes:
            pipe.send((str(folder), False))
        return self._attend()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _attend(self) -> Any:
        sent = super()._attend()
        for pipe in self._pipes[1:]:
            assert pipe.recv() == ("done", None)
        return sent
