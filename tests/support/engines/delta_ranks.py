"""Deltas into two ranks or four, run as a script: prints what happened as JSON.

Usage: python -m tests.support.engines.delta_ranks CHECKPOINT PARALLEL \
    [STAGING [OPTIONS]]

PARALLEL is `tensor`, `pipeline` or `expert`: experts are shared out over the two ranks,
and other layers are cut. With `four` there are four tensor-parallel ranks. OPTIONS of
the engine are JSON.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.deltas import delta_between, stepped
from tests.support.engines.probe import prompts
from tests.support.engines.script import tell
from vllm.inflight.errors import InflightError

NUM_STEPS = 4
LAYER = "model.layers.0"
ALTERED = {
    "tensor": [
        (f"{LAYER}.self_attn.q_proj.weight", [0, 1]),
        ("model.norm.weight", [0, 1]),
    ],
    "four": [(f"{LAYER}.self_attn.k_proj.weight", [1, -1, 0, 0])],
}
"""Tensors of a delta that reach each rank with other bits: one that is cut, one that is
whole, and one whose parts two of four ranks hold each."""


def main(
    folder: str, parallel: str, staging: str = "auto", options: str = "{}"
) -> None:
    from vllm import LLM, SamplingParams
    from vllm.config.weight_transfer import WeightTransferConfig

    from vllm.inflight.trainer import Publisher

    ranks: dict[str, Any] = {f"{parallel}_parallel_size": 2}
    if parallel == "four":
        ranks = {"tensor_parallel_size": 4}
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
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate(prompts(8), params, use_tqdm=False)
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
        # Some families are cut in a way that takes whole versions alone.
        to_alter = ALTERED.get(parallel, []) if seen["after that"][0] else []
        seen["altered"] = [altered(llm, weights, *each, served) for each in to_alter]
        seen["other bits"] = written_before_swap(llm, stepped(weights, 9))
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


def altered(
    llm: Any,
    weights: dict[str, Any],
    name: str,
    units: list[int],
    served: Callable[[], Any],
) -> dict[str, Any]:
    """A delta that is altered on its way, and the same one as it should be."""
    new, seen = stepped(weights, 7), {"before": served()}
    # A step may have left a small tensor as it is.
    new[name].view(-1).view(torch.uint8)[0] ^= 1
    manifest, parts = delta_between(weights, new, seen["before"][0])

    def send() -> None:
        update_id = llm.start_weight_update(manifest=manifest)["update_id"]
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            save_file(parts, file.name)
            llm.update_weights({"path": file.name}, update_id=update_id)
            llm.finish_weight_update(update_id=update_id)

    llm.collective_rpc("tests_alter_next_delta", args=(name, units))
    try:
        send()
    except InflightError as error:
        seen["refusal"] = [error.code, str(error)]
    seen["after"] = served()
    send()
    seen["then"] = served()
    llm.rollback_weights()
    seen["back"] = served()
    return seen


def written_before_swap(llm: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """A version whose swap meets other bits on one rank, and what follows it."""
    from vllm.inflight.trainer import Publisher

    seen: dict[str, Any] = {"before": llm.collective_rpc("tests_bits")}
    llm.collective_rpc("tests_write_before_next_swap")
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        save_file(weights, file.name)
        try:
            llm.update_weights_from_disk(file.name)
        except InflightError as error:
            seen["refusal"] = [error.code, str(error)]
    seen["after"] = llm.collective_rpc("tests_bits", args=(True,))
    seen["digest"] = llm.weight_info()["digest"]
    with Publisher(llm, lambda: weights) as to:
        seen["are deltas"] = []
        for seed in range(2):
            seen["are deltas"].append(to.publish().is_delta)
            weights = stepped(weights, seed)
        seen["are deltas"].append(to.publish().is_delta)
        seen["deltas"] = llm.collective_rpc("tests_bits")
    with Publisher(llm, lambda: weights, delta="off") as to:
        to.publish()
        seen["whole"] = llm.collective_rpc("tests_bits")
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
