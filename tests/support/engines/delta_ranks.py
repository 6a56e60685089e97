"""Deltas into two ranks, run as a script: prints what happened as JSON.

Usage: python -m tests.support.engines.delta_ranks CHECKPOINT PARALLEL \
    [STAGING [OPTIONS]]

PARALLEL is `tensor`, `pipeline` or `expert`: experts are shared out over the two ranks,
and other layers are cut. OPTIONS of the engine are JSON.
"""

import json
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.support.deltas import stepped
from tests.support.engines.probe import prompts
from tests.support.engines.script import tell

NUM_STEPS = 4


def main(
    folder: str, parallel: str, staging: str = "auto", options: str = "{}"
) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig

    from vllm.inflight.trainer import Publisher

    ranks: dict[str, Any] = {f"{parallel}_parallel_size": 2}
    if parallel == "expert":
        ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    extension = "transport.Extension"
    if staging == "delta":
        extension = "unpacked_ranks.Unpacked"

    def start(model: str) -> LLM:
        return LLM(
            model,
            **ranks,
            **json.loads(options),
            max_model_len=512,
            block_size=32,
            max_num_seqs=8,
            enforce_eager=True,
            disable_log_stats=True,
            weight_transfer_config=WeightTransferConfig(backend="local"),
            worker_extension_cls=f"tests.support.engines.{extension}",
            additional_config={"inflight": {"staging": staging, "delta_gib": 0.02}},
        )

    llm = start(folder)
    if parallel == "pipeline":
        llm.collective_rpc("tests_make_room")

    def served() -> Any:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        outputs = llm.generate(prompts(4), params, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        return llm.weight_info()["digest"], tokens

    def drift() -> Any:
        return llm.weight_update_status()["outcomes"][0]["result"]["drift"]

    file = Path(folder) / "model.safetensors"
    weights, seen = load_file(file), dict[str, Any]()
    with Publisher(llm, lambda: weights) as to:
        to.publish()
        seen["deltas"], seen["drifts"] = [], []
        for seed in range(NUM_STEPS):
            weights = stepped(weights, seed)
            seen["deltas"].append((to.publish().is_delta, *served()))
            seen["drifts"].append(drift())
        to.rollback()
        seen["rolled back"] = served()
        to.rollback()
        weights = stepped(weights, NUM_STEPS)
        seen["after that"] = (to.publish().is_delta, *served())
    if staging == "delta":
        llm.collective_rpc("tests_refuse_next_swap")
        try:
            llm.update_weights_from_disk(str(file))
        except Exception as refusal:  # the test says which
            seen["refusal"] = str(refusal)
        seen["back after it"] = []
        for _ in range(2):
            llm.rollback_weights()
            seen["back after it"].append(served())
    seen["scrubbed"] = llm.verify_weights()["result"]
    weights, seen["wholes"], seen["drifts of wholes"] = load_file(file), [], []
    with tempfile.TemporaryDirectory() as root:
        for seed in range(NUM_STEPS + 1):
            weights = stepped(weights, seed)
            save_file(weights, Path(root) / "model.safetensors")
            llm.update_weights_from_disk(str(Path(root) / "model.safetensors"))
            seen["wholes"].append(served())
            seen["drifts of wholes"].append(drift())
        if staging == "delta":
            with suppress(Exception):  # executors raise different ones
                llm.collective_rpc("tests_fail_as_it_writes")
            seen["lost"] = llm.weight_info()["weights"]
            llm.update_weights_from_disk(str(Path(root) / "model.safetensors"))
            seen["filled"] = served()
        llm.llm_engine.engine_core.shutdown()
        if parallel == "expert":
            others = shutil.ignore_patterns("*.safetensors")
            shutil.copytree(folder, root, ignore=others, dirs_exist_ok=True)
            llm = start(root)
            seen["fresh"] = served()[1]
            llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
