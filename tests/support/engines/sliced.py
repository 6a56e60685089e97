"""Two tensor-parallel ranks, updated in slices; run as a script: prints JSON.

Usage: python -m tests.support.engines.sliced OLD NEW
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.probe import checksums, greedy
from tests.support.engines.script import OPTIONS, tell
from tests.support.engines.sync_client import gloo_trainer
from tests.support.models.sliced_source import SlicedSource
from vllm.inflight.errors import InflightError
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.transport.buckets.tensor_slices import Shard

MISSING = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"


def start(folder: Path) -> Any:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    return LLM(
        str(folder),
        tensor_parallel_size=2,
        weight_transfer_config=WeightTransferConfig(backend="inflight_gloo"),
        additional_config={"inflight": {"update_deadline_s": 60.0, "stage_share": 1.0}},
        **OPTIONS,
    )


def state(llm: Any) -> Any:
    """What both ranks say and serve, and under which label."""
    return [greedy(llm), checksums(llm), llm.get_weight_version()]


def refusal(attempt: Any) -> Any:
    """The error that it ends with, as plain data."""
    try:
        attempt()
    except InflightError as error:
        return error.to_dict()
    return None


def announce(llm: Any, update_info: dict[str, Any]) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": update_info})


def main(old: Path, new: Path) -> None:
    fresh = start(new)
    seen: dict[str, Any] = {"expected": state(fresh)}
    fresh.llm_engine.engine_core.shutdown()
    llm = start(old)
    seen["before"] = state(llm)
    whole = SlicedSource(new, 2)
    trainer = gloo_trainer(llm, whole, num_ranks=2, bucket_bytes=1 << 14)

    short = SlicedSource(new, 2)
    gone = next(e for e in short.entries if e[0] == MISSING)
    short.entries.remove(gone)
    trainer.source = short
    seen["trainer refuses"] = refusal(trainer.send_weights)
    facts = [
        (name, tensor.dtype, tuple(tensor.shape), s)
        for name, tensor, s in whole.entries
    ]
    told = TensorList(*map(tuple, zip(*facts, strict=True))).update_info
    at = whole.entries.index(next(e for e in whole.entries if e[0] == MISSING))
    missing = {key: [*some[:at], *some[at + 1 :]] for key, some in told.items()}
    seen["engine refuses"] = refusal(lambda: announce(llm, missing))
    shards = [s and s | {"rank": s.get("rank", 0) + 1} for s in told["shards"]]
    seen["unknown rank"] = refusal(lambda: announce(llm, told | {"shards": shards}))
    seen["after refusals"] = state(llm)

    differing = SlicedSource(new, 2)
    differing.entries = [
        (name, tensor + torch.tensor(1.0), shard)
        if name == NORM and shard == Shard(dim=0, start=0, size=len(tensor), rank=1)
        else (name, tensor, shard)
        for name, tensor, shard in differing.entries
    ]
    trainer.source = differing
    seen["ranks that differ"] = refusal(trainer.send_weights)
    seen["after ranks that differ"] = state(llm)

    for turn, source in {
        "two ranks": whole,
        "two ranks again": whole,
        "three slices": SlicedSource(new, 3, are_told=False),
    }.items():
        trainer.source = source
        trainer.send_weights()
        seen[turn] = state(llm)
        llm.rollback_weights()
        seen[f"after {turn}"] = state(llm)
    trainer.shutdown()
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(Path(sys.argv[1]), Path(sys.argv[2]))
