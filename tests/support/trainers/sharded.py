"""Two ranks of a trainer that share out one model in every way that torch knows.

As a script: python -m tests.support.trainers.sharded FOLDER; rank 0 writes what it
gathers of each into a file of the folder.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

from vllm.inflight.trainer.sources.stream import facts, gathering, take_part, tensors

PATIENCE = timedelta(seconds=60)


class Block(nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6)
        self.down = nn.Linear(6, 8, bias=False)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("scratch", torch.rand(3), persistent=False)


class Plain(nn.Module):
    """Blocks, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.embed.weight


def plain() -> nn.Module:
    """Of torch alone; the same on every rank."""
    torch.manual_seed(0)
    return Plain()


def mixtral(*, tied: bool = True) -> Any:
    """A model of transformers, whose experts are fused in memory."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        tie_word_embeddings=tied,
    )
    return MixtralForCausalLM(config)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers of either."""
    found = model.layers if isinstance(model, Plain) else model.model.layers
    return list(found)


def ddp(model: nn.Module) -> nn.Module:
    """A copy on every rank."""
    return DistributedDataParallel(model)


def second(model: nn.Module) -> nn.Module:
    """FSDP's second version: `DTensor`s."""
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    return model


def first(model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    """FSDP's first version: flat parameters, or views of them."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(blocks(model)[0])}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def in_part(model: nn.Module) -> nn.Module:
    """Only its layers, in FSDP's first version; the rest is whole on every rank."""
    layers = model.layers if isinstance(model, Plain) else model.model.layers
    for number, block in enumerate(blocks(model)):
        layers[number] = FullyShardedDataParallel(
            block, use_orig_params=False, device_id=torch.device("cpu")
        )
    return model


WAYS: dict[str, Any] = {
    "ddp": ddp,
    "second": second,
    "flat": lambda model: first(model, use_orig_params=False),
    "views": lambda model: first(model, use_orig_params=True),
    "in_part": in_part,
}
MODELS: dict[str, Any] = {"plain": plain, "mixtral": mixtral}


def main(rank: int, folder: str) -> None:
    """What one rank does."""
    place = {"rank": rank, "world_size": 2, "timeout": PATIENCE}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **place)
    for name, make in MODELS.items():
        for way, share in WAYS.items():
            model = share(make())
            told = [(n, *it) for n, it in facts(model)]
            if rank:
                take_part(model)
                continue
            with gathering(tensors(model)) as gathered:
                found = [(n, t.clone()) for n, t in gathered]
            assert told == [(n, t.dtype, tuple(t.shape)) for n, t in found]
            file = Path(folder) / f"{name}-{way}.safetensors"
            save_file({n: t.contiguous() for n, t in found}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(main, (sys.argv[1],), nprocs=2)
