"""What TRL's own files do, in a process of their own.

Usage: python -m tests.support.frameworks.trl sampled
       python -m tests.support.frameworks.trl colocated SLEEPS OLD NEW

The package is in build/frameworks (`make test-frameworks`), with accelerate, and
without what else it depends on. `sampled` prints the prompts of one batch as TRL's
sampler orders them. `colocated` starts an engine as TRL's trainers do that share its
process, has TRL send new weights, and prints what is served. If SLEEPS is not empty,
the engine sleeps before that, as with `vllm_enable_sleep_mode`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import OPTIONS, tell

PROMPT = {"prompt_token_ids": list(range(3, 40))}


def sampled() -> None:
    """A batch of two prompts with two generations each, as `GRPOTrainer` gets it."""
    prompts = ["hello", "you"]
    sampler = import_module("trl.trainer.utils").RepeatSampler(
        prompts, mini_repeat_count=2, batch_size=2, repeat_count=1, shuffle=False
    )
    tell({"prompts": [prompts[number] for number in sampler]})


def colocated(sleeps: str, old: str, new: str) -> None:
    """TRL's `VLLMGeneration` sends its model to the engine that it has started."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    from tests.support.engines.unpacked import unpack

    unpack()  # as on a GPU, whose layers take tensors after the start too
    generation = import_module("trl.generation.vllm_generation")
    generation.LLM = partial(
        generation.LLM,
        enforce_eager=True,
        num_gpu_blocks_override=OPTIONS["num_gpu_blocks_override"],
    )
    model = AutoModelForCausalLM.from_pretrained(old, dtype="auto")
    ours = generation.VLLMGeneration(
        model,
        Accelerator(cpu=True),
        processing_class=None,
        gpu_memory_utilization=OPTIONS["gpu_memory_utilization"],
        max_model_length=OPTIONS["max_model_len"],
        max_num_seqs=4,
    )
    llm = ours.llm
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def says() -> list[int]:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def served() -> dict[str, Any]:
        return dict(llm.weight_info())

    llm.update_weights_from_disk(new, "new")
    expected, digest = says(), served()["digest"]
    llm.update_weights_from_disk(old, "old")
    before = says()
    ours.model = AutoModelForCausalLM.from_pretrained(new, dtype="auto")
    if sleeps:  # the CPU platform does not let an engine start with it
        core = llm.llm_engine.engine_core.engine_core
        core.vllm_config.model_config.enable_sleep_mode = ours.enable_sleep_mode = True
        llm.sleep(level=2)
    ours.sync_weights()
    if sleeps:
        llm.wake_up(tags=["kv_cache"])
    tokens = says()
    info = served()
    tell(
        {
            "label": info["weight_version"],
            "epoch": info["epoch"],
            "digest": info["digest"],
            "digest of files": digest,
            "is new": before != tokens == expected,
        }
    )


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    OWN["trl"].use()
    {"sampled": sampled, "colocated": colocated}[sys.argv[1]](*sys.argv[2:])
