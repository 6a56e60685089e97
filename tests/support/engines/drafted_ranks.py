"""A model and its drafter on two ranks, run as a script: prints what happened as JSON.

Usage: python -m tests.support.engines.drafted_ranks CASE

CASE is JSON: `models` and `drafters` are folders, an old and a new one each, `config`
is the `speculative_config` that belongs to the old ones, and `drafter` is the name of
one of its tensors, as it is sent. MTP layers have no folders of their own; their `mtp`
is the pattern of their tensors.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.engines.mixtures import part
from tests.support.engines.probe import checksums, greedy, outcome
from tests.support.engines.script import OPTIONS, tell
from vllm.inflight.update import DRAFT


def start(case: dict[str, Any], version: int) -> Any:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    config = case["config"]
    if case["drafters"]:
        config = config | {"model": case["drafters"][version]}
    return LLM(
        case["models"][version],
        speculative_config=config,
        tensor_parallel_size=2,
        weight_transfer_config=WeightTransferConfig(backend="other"),
        worker_extension_cls="tests.support.engines.transport.Extension",
        **(OPTIONS | case["options"]),
    )


def state(llm: Any) -> dict[str, Any]:
    """What is said, and what every rank serves of the model and of its drafter."""
    served = checksums(llm)
    of_drafter = [
        {name: digest for name, digest in rank.items() if name.startswith(DRAFT)}
        for rank in served
    ]
    of_model = [
        {name: digest for name, digest in rank.items() if not name.startswith(DRAFT)}
        for rank in served
    ]
    return {"tokens": greedy(llm), "model": of_model, "drafter": of_drafter}


def main(case: dict[str, Any]) -> None:
    drafters, new = case["drafters"], case["models"][1]
    both = [
        {"path": model, **({"draft_path": draft} if drafters else {})}
        for model, draft in zip(case["models"], drafters or (None, None), strict=True)
    ]
    fresh = start(case, 1)
    seen: dict[str, Any] = {"expected": state(fresh), "commits": [], "others": []}
    fresh.llm_engine.engine_core.shutdown()
    llm = start(case, 0)
    seen["before"] = state(llm)

    path, alone, name = (drafters or case["models"])[1], bool(drafters), case["drafter"]
    for rank in (0, 1):
        seen[f"rank {rank}"] = [
            outcome(llm, path, alone=alone, fail_rank=rank, **fault)
            for fault in ({"reshape": name}, {"poison": name}, {"skip": [name]})
        ]
    seen["after faults"] = state(llm)
    seen["label after faults"] = llm.get_weight_version()
    for _ in range(2):
        llm.update_weights_from_disk(**both[1], weight_version="new")
        seen["commits"].append(state(llm))
        llm.rollback_weights()
        seen["others"].append(state(llm))
        llm.update_weights_from_disk(**both[1], weight_version="again")
        seen["commits"].append(state(llm))
        llm.update_weights_from_disk(**both[0], weight_version="old")
        seen["others"].append(state(llm))
    with tempfile.TemporaryDirectory() as root:
        if drafters:
            llm.update_weights_from_disk(None, draft_path=drafters[1])
        else:
            only = part(Path(new), [case["mtp"]], Path(root))
            llm.update_weights_from_disk(only, subset=[case["mtp"]])
        seen["alone"] = state(llm)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    described = json.loads(sys.argv[1])
    # Latent attention on a CPU: all prompts there before the first step, as in
    # family_ranks.py.
    is_latent = "attention_backend" in described["options"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if is_latent else "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(described)
