"""A quantised model on two ranks, run as a script: prints what happened as JSON.

Usage: python -m tests.support.engines.quantised_ranks OLD NEW OPTIONS

OPTIONS are those of the engine, as JSON.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.engines.mixtures import MLP, mixed, part
from tests.support.engines.probe import checksums, greedy, outcome
from tests.support.engines.script import OPTIONS, tell

WEIGHT = "model.layers.1.mlp.down_proj.weight"
SCALE = f"{WEIGHT}_scale"
EXTENSION = {"worker_extension_cls": "tests.support.engines.transport.Extension"}


def main(old: str, new: str, options: dict[str, Any]) -> None:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    def start(folder: str) -> Any:
        llm = LLM(
            folder,
            weight_transfer_config=WeightTransferConfig(backend="other"),
            **(OPTIONS | EXTENSION | options),
        )
        if "pipeline_parallel_size" in options:
            llm.collective_rpc("tests_make_room")
        return llm

    def state(llm: Any) -> Any:
        """What is said, and what every rank serves."""
        return greedy(llm), checksums(llm)

    send = partial(outcome, path=new)
    fresh = start(new)
    seen: dict[str, Any] = {"expected": state(fresh), "commits": [], "others": []}
    fresh.llm_engine.engine_core.shutdown()
    llm = start(old)
    seen["before"] = state(llm)
    for rank in (0, 1):
        seen[f"rank {rank}"] = {
            "reshaped": send(llm, reshape=WEIGHT, fail_rank=rank),
            "poisoned": send(llm, poison=SCALE, fail_rank=rank),
            "short": send(llm, skip=[WEIGHT], fail_rank=rank),
            "broken": send(llm, fail_after=9, fail_rank=rank),
        }
        seen[f"after rank {rank}"] = state(llm)
        seen[f"label after rank {rank}"] = llm.get_weight_version()
    for _ in range(2):
        llm.update_weights_from_disk(new, "new")
        seen["commits"].append(state(llm))
        llm.rollback_weights()
        seen["others"].append(state(llm))
        assert send(llm) == "committed"
        seen["commits"].append(state(llm))
        llm.update_weights_from_disk(old, "old")
        seen["others"].append(state(llm))
    with tempfile.TemporaryDirectory() as root:
        whole = mixed(Path(old), Path(new), MLP, Path(root) / "whole")
        llm.update_weights_from_disk(str(whole))
        seen["mixture"] = state(llm)
        llm.update_weights_from_disk(old)
        only = part(Path(new), MLP, Path(root) / "part")
        llm.update_weights_from_disk(only, subset=list(MLP))
        seen["subset"] = state(llm)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
