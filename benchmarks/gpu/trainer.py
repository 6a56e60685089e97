"""The trainer of the GPU benchmark: it sends a model's weights on command.

`python -m benchmarks.gpu.trainer BACKEND FOLDER HANDLE`, started by arm.py. All arms
use upstream's trainer interface, with the trainer engine of their backend. Its calls
of the inference side pass through the pipe. With several ranks (`TRAINER_RANKS`) the
weights are shared out over them, and each looks for changes in its own shards.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.plugins import load_general_plugins

from benchmarks.gpu.trainer_ranks import RANK, Ranks, ShardedWeights
from benchmarks.shapes import SAVES, TRAINER_GPU, num_ranks, num_trainer_ranks
from vllm.inflight.releases.table import adapter

SPREAD = 0.02

_Source: Any = adapter("weight source")


class Weights(_Source):
    """Every parameter of a model in bf16, drawn once."""

    def __init__(self, folder: str, device: torch.device) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        torch.manual_seed(0)
        self.own: dict[str, torch.Tensor] = {}
        for name, param in model.named_parameters():
            tensor = torch.empty(param.shape, dtype=torch.bfloat16, device=device)
            self.own |= saved(name, tensor.normal_(0, SPREAD))

    def save(self, folder: str) -> None:
        """Write the checkpoint, for an engine that starts with these weights."""
        tensors = {name: tensor.cpu() for name, tensor in self.own.items()}
        save_file(tensors, f"{folder}/model.safetensors")

    def read_facts(self) -> list[ParamMeta]:
        """Name, dtype and shape of every tensor."""
        return [ParamMeta(n, t.dtype, t.shape) for n, t in self.own.items()]

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.own.items())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.own[name]


def change(own: dict[str, torch.Tensor]) -> None:
    """Make another version, in which the most likely token is the least likely.

    Args:
        own: the tensors of this rank, or its shards of them.

    """
    own["lm_head.weight" if "lm_head.weight" in own else next(iter(own))].neg_()


def step(own: dict[str, torch.Tensor], share: float) -> None:
    """Change a share of all elements by one unit in the last place."""
    for tensor in own.values():
        bits = tensor.view(-1).view(torch.int16)
        # Other elements at each step; a draw for each would take seconds.
        every = round(1 / share)
        first = int(torch.randint(0, every, ()))
        bits[first::every] += 1


def saved(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A parameter of transformers as views with the names of a checkpoint.

    Transformers holds the experts of a layer in two parameters, [experts, out, in].
    """
    layer, _, kind = name.rpartition(".")
    if not layer.endswith(".experts"):
        return {name: tensor}
    matrices = {kind: tensor}
    if kind == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        matrices = {"gate_proj": gate, "up_proj": up}
    return {
        f"{layer}.{number}.{of}.weight": matrix
        for of, stacked in matrices.items()
        for number, matrix in enumerate(stacked)
    }


class Client:
    """The inference side, reached through the arm: one call at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._began = 0.0
        self.call_s = 0.0
        """Seconds from the first call of the last update to the reply of its commit."""

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        """Join the group."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self, manifest: dict[str, Any] | None = None) -> None:
        """Open an update."""
        self._began = time.perf_counter()
        self._call("start_weight_update", manifest)

    def update_weights(
        self,
        update_info: Any,
        *,
        start: dict[str, Any] | None = None,
        finish: dict[str, Any] | None = None,
    ) -> None:
        """Receive the tensors; open the update before, and commit it after."""
        if start is not None:
            self._began = time.perf_counter()
        given = {"start": start, "finish": finish}
        options = {name: value for name, value in given.items() if value is not None}
        self._call("update_weights", (update_info, options))
        if finish is not None:
            self.call_s = time.perf_counter() - self._began

    def finish_weight_update(self) -> None:
        """Commit the update."""
        self._call("finish_weight_update", None)
        self.call_s = time.perf_counter() - self._began

    def _call(self, method: str, payload: Any) -> None:
        with self._lock:
            self._pipe.send((method, payload))
            if (error := self._pipe.recv()) is not None:
                raise error


def init_info(
    backend: str, port: int, num_workers: int, rank: int = 0, *, shards: bool = False
) -> Any:
    """The argument by which upstream's factory chooses the trainer engine."""
    if backend == "inflight_ipc":
        from vllm.inflight.transport import IpcTrainerInitInfo

        if shards:  # a gathered tensor is in memory only while it is lent
            return IpcTrainerInitInfo(rank=rank, delta_shards=True)
        # The weights stay where they are, so all of them can be lent at once.
        return IpcTrainerInitInfo(rank=0, chunk_bytes=1 << 40)
    common: dict[str, Any] = {
        "rank": rank,
        "master_address": "127.0.0.1",
        "master_port": port,
        "world_size": 1 + num_workers,
    }
    if backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(**common)
    from vllm.inflight.transport import GlooTrainerInitInfo, NcclTrainerInitInfo

    common["delta_shards"] = shards
    if backend == "inflight_gloo":
        return GlooTrainerInitInfo(**common)
    return NcclTrainerInitInfo(**common)


def main(backend: str, folder: str, handle: str) -> None:
    """Join the group, then send a new version at every command."""
    size, rank = num_trainer_ranks(), int(os.environ.get(RANK, 0))
    pipe = Connection(int(handle)) if rank == 0 else None
    load_general_plugins()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        number = int(os.environ.get(TRAINER_GPU, num_ranks(folder))) + rank
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    ranks = Ranks(size, backend, folder, device) if size > 1 else None
    weights: Any = (ShardedWeights if ranks else Weights)(folder, device)
    if os.environ.get(SAVES):
        weights.save(folder)

    def heard() -> Any:
        """What the arm says next, on every rank."""
        word = None if pipe is None else pipe.recv()
        return word if ranks is None else ranks.told(word)

    def say(word: str, facts: Any = None) -> None:
        if pipe is not None:
            pipe.send((word, facts))

    say("ready")
    info = init_info(
        backend, heard(), num_ranks(folder), rank, shards=ranks is not None
    )
    client = None if pipe is None else Client(pipe)
    engine = WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=weights
    )
    if getattr(getattr(engine, "model_update_group", None), "disabled", False):
        # Upstream's communicator then sends nothing and says nothing.
        raise RuntimeError("upstream's NCCL communicator is disabled: NCCL >= 2.29.7?")
    say("done")
    whole_bytes = float(
        sum(prod(each.shape) * each.dtype.itemsize for each in weights.read_facts())
    )
    while (command := heard()) is not None:
        kind, _, share = command.rpartition(" ")
        is_whole = kind == "whole" or command == "send"
        if share == "send":
            change(weights.own)
        elif float(share) > 0:  # else the same version is sent again
            step(weights.own, float(share))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        deltas = getattr(engine, "deltas", None)
        if deltas is not None:
            # A whole version is sent from the weights themselves.
            deltas.policy = "off" if is_whole else kind or "always"
        engine.send_weights()
        if client is None:
            continue
        facts = {"call_s": client.call_s, "bytes": whole_bytes}
        if deltas is not None and not is_whole:
            sent = deltas.last
            facts |= {"find_s": sent.search_s, "bytes": float(sent.num_bytes)}
            facts |= {"is_delta": float(sent.is_delta)}
            facts |= {"gathered_bytes": float(sent.gathered_bytes)} if ranks else {}
        say("done", facts)


if __name__ == "__main__":
    main(*sys.argv[1:])
