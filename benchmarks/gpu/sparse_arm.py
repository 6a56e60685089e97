"""Upstream's own sparse updates, without their transfer, on one GPU.

`python -m benchmarks.gpu.sparse_arm NAME FOLDER FD`, started by
`python -m benchmarks.gpu.delta`. Upstream's backend `sparse_nccl` receives flat indices
and values of each tensor in a pause, and then applies them by a function of its own.
This arm has them on the engine's GPU already, and calls that function. So it lacks what
finding and sending the changes take.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.arm import Arm, serve
from benchmarks.gpu.arm import ENGINE, ON_HOST


def prepare(worker: Any, folder: str, share: float) -> None:
    """Runs in the engine's process: make what a trainer would have sent."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
    )

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    every = round(1 / share)
    worker.bench_patches = []
    for name, param in model.named_parameters():
        options = {"dtype": torch.int32, "device": worker.device}
        indices = torch.arange(0, param.numel(), every, **options)
        values = torch.full((len(indices),), 0.01, dtype=torch.bfloat16)
        worker.bench_patches.append(
            CheckpointWeightPatch(
                *(name, tuple(param.shape), torch.bfloat16),
                values.to(worker.device),
                indices,
            )
        )


def apply(worker: Any) -> None:
    """Runs in the engine's process: write them into the weights."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        load_checkpoint_weight_patches,
    )

    load_checkpoint_weight_patches(worker.model_runner.model, worker.bench_patches)


async def update(engine: Any, share: str, folder: str) -> dict[str, float]:
    """Apply changes in a pause, as upstream's trainers do; they are made before."""
    await engine.collective_rpc(prepare, args=(folder, float(share)))
    called = time.monotonic()
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc(apply)
    await engine.resume_generation()
    return {"called": called}


async def main(name: str, folder: str, handle: str) -> None:
    del name
    given = ENGINE | ({} if torch.cuda.is_available() else ON_HOST)
    given.pop("worker_extension_cls", None)
    given |= json.loads(os.environ.get("BENCH_ENGINE", "{}"))
    arm = Arm(
        folder,
        lambda engine, share: update(engine, share, folder),
        load_format="dummy",
        dtype="bfloat16",
        **given,
    )
    await serve(arm, Connection(int(handle)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
