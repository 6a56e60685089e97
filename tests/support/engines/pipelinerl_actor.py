"""An engine of two ranks as one of PipelineRL's actors, each of two GPUs: prints JSON.

The trainer opens its group with torch. The workers of the actors before this one are
played.

Usage: python -m tests.support.engines.pipelinerl_actor OLD NEW ACTOR_IDX BACKEND
"""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.engines.oracle import Oracle, differing
from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell
from tests.support.engines.torch_trainer import HOST, facts, training
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.engine.compat.pipelinerl import group

NUM_GPUS = 2
"""Of each actor."""


def asked(folder: Path, version: int) -> dict[str, Any]:
    """PipelineRL's `WeightUpdateRequest`."""
    told = facts(folder)
    return {
        "kind": "weight_update_request",
        "version": version,
        "parameters_info": [
            {"name": name, "shape": shape, "dtype": f"torch.{dtype}"}
            for name, dtype, shape in zip(*told.values(), strict=True)
        ],
    }


def main(old: Path, new: Path, actor_idx: int, backend: str) -> None:
    from vllm import LLM

    llm = LLM(
        str(old),
        tensor_parallel_size=NUM_GPUS,
        worker_extension_cls=f"{Oracle.__module__}.{Oracle.__qualname__}",
        **OPTIONS,
    )
    seen: dict[str, Any] = {"before": greedy(llm), "differing": [], "others": []}
    world_size = 1 + (actor_idx + 1) * NUM_GPUS
    with ExitStack() as stack:
        trainer = stack.enter_context(training("actor", world_size, backend))
        ranks = range(1, 1 + actor_idx * NUM_GPUS)
        others = [stack.enter_context(trainer.beside(rank)) for rank in ranks]
        address = f"tcp://{HOST}:{trainer.port}"
        its_group = group(actor_idx, NUM_GPUS, address, world_size)
        # PipelineRL's own call leaves the wire to the device, which would be NCCL.
        join = control_of(llm).join_group(its_group | {"backend": backend})
        run_sync(join)
        for version, folder in enumerate((new, old, new)):
            for other in others:
                other.send(folder / "model.safetensors")
            trainer.begin(folder, facts(folder)["names"])
            llm.pause_and_update(asked(folder, version))
            seen["differing"] += differing(llm, folder)
            seen["others"] += [other.recv() for other in others]
            seen[f"version {version}"] = greedy(llm)
        seen["label"] = llm.get_weight_version()
    llm.update_weights_from_disk(str(new))
    seen["expected"] = greedy(llm)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
