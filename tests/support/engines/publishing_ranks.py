"""A trainer of two ranks under FSDP2, in processes of their own: each a publisher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from tests.support.preloaded_process import nursery
from vllm.inflight.errors import InflightError
from vllm.inflight.trainer import Outcome, Publisher

NUM_RANKS = 2


def run(pipe: Any, rank: int, store: str, folder: str, url: str, key: str) -> None:
    """The process of one rank: publishes what it is told to."""
    place = {"rank": rank, "world_size": NUM_RANKS}
    dist.init_process_group("gloo", init_method=store, **place)
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    publisher: Any = None
    pipe.send("ready")
    while True:
        order, options = pipe.recv()
        if order == "connect":
            # The engines of other ranks than the first are not asked.
            engines = url if rank == 0 else []
            model.to(torch.float32 if "dtype" in options else torch.bfloat16)
            publisher = Publisher(
                engines, model, api_key=key, delta_shards=True, **options
            )
            pipe.send("connected")
            continue
        load(model, load_file(Path(order, "model.safetensors")))
        try:
            outcome = publisher.publish(**options)
        except InflightError as error:
            pipe.send(error)
            continue
        last = publisher._shards.last
        pipe.send((outcome, 0 if last is None else last.gathered_bytes))


def load(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Give this rank its shards of a checkpoint.

    Weights in float32 are near to these numbers, which they are rounded to.
    """
    for name, own in model.state_dict(keep_vars=True).items():
        assert isinstance(own, DTensor)
        assert own.to_local().numel() < own.numel(), "a rank has a part alone"
        new = tensors[name]
        if own.dtype == torch.float32:
            new = new.float() * (1 + 5e-4)
        new = distribute_tensor(new, own.device_mesh, own.placements)
        own.detach().to_local().copy_(new.to_local())


class PublishingRanks:
    """The test's end of them; `with` ends the processes.

    Args:
        url: of the server that they publish to.
        key: of its control routes.
        folder: the first checkpoint that the ranks have.
        store: a file by which they meet.

    """

    def __init__(self, url: str, key: str, folder: Path, store: Path) -> None:
        self._pipes, self._processes = [], []
        for rank in range(NUM_RANKS):
            pipe, theirs = nursery.Pipe()
            process = nursery.Process(
                target=run,
                args=(theirs, rank, f"file://{store}", str(folder), url, key),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def __enter__(self) -> PublishingRanks:
        assert self._heard() == ["ready"] * NUM_RANKS
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def connect(self, **options: Any) -> None:
        """Make a publisher on every rank."""
        self._say("connect", options)
        assert self._heard() == ["connected"] * NUM_RANKS

    def publish(self, folder: Path, **options: Any) -> tuple[Outcome, int]:
        """Publish a checkpoint; the outcome, and the bytes that rank 1 brought.

        Raises what was raised on all ranks.
        """
        self._say(str(folder), options)
        first, other = self._heard()
        if isinstance(first, InflightError):
            assert (type(other), str(other)) == (type(first), str(first))
            raise first
        assert other == (first[0], 0)
        outcome, num_bytes = first
        return outcome, num_bytes

    def _say(self, order: str, options: dict[str, Any]) -> None:
        for pipe in self._pipes:
            pipe.send((order, options))

    def _heard(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]
