"""What TRL's own files do, in a process of their own.

Usage: python -m tests.support.frameworks.trl sampled
       python -m tests.support.frameworks.trl colocated SLEEPS OLD NEW
       python -m tests.support.frameworks.trl online_dpo SLEEPS OLD FOLDER

The package is in build/frameworks (`make test-frameworks`), with accelerate, and
without what else it depends on. `sampled` prints the prompts of one batch as TRL's
sampler orders them. `colocated` starts an engine as TRL's trainers do that share its
process, has TRL send new weights, and prints what is served. `online_dpo` lets the
whole `OnlineDPOTrainer` train a model, whose last weights go to FOLDER. If SLEEPS is
not empty, the engine sleeps before new weights come, as with `vllm_enable_sleep_mode`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
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


class Engine:
    """The engine that TRL has started in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def says(self) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = self.llm.generate([PROMPT], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def served(self) -> dict[str, Any]:
        info = self.llm.weight_info()
        return {key: info[key] for key in ("weight_version", "epoch", "digest")}

    def of_files(self, folder: str | Path, label: str) -> tuple[list[int], str]:
        """What it says with the weights of a folder, and their digest."""
        self.llm.update_weights_from_disk(str(folder), label)
        return self.says(), self.served()["digest"]

    def labelled(self) -> list[list[str]]:
        """A list that gets the labels of the tokens of each `generate` from now on."""
        labels: list[list[str]] = []
        generate = self.llm.generate

        def noted(*args: Any, **kwargs: Any) -> Any:
            outputs = generate(*args, **kwargs)
            completions = (each for output in outputs for each in output.outputs)
            spans = (span for each in completions for span in each.weight_versions)
            labels.append(sorted({span["version"] for span in spans}))
            return outputs

        self.llm.generate = noted
        return labels

    def allow_sleep(self) -> None:
        """Let it sleep: the CPU platform does not let an engine start so."""
        core = self.llm.llm_engine.engine_core.engine_core
        core.vllm_config.model_config.enable_sleep_mode = True


def small(module: ModuleType) -> None:
    """Let a module of TRL start engines of the size that tests have."""
    from tests.support.engines.unpacked import unpack

    unpack()  # as on a GPU, whose layers take tensors after the start too
    vars(module)["LLM"] = partial(
        vars(module)["LLM"],
        enforce_eager=True,
        num_gpu_blocks_override=OPTIONS["num_gpu_blocks_override"],
    )


def colocated(sleeps: str, old: str, new: str) -> None:
    """TRL's `VLLMGeneration` sends its model to the engine that it has started."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    generation = import_module("trl.generation.vllm_generation")
    small(generation)
    model = AutoModelForCausalLM.from_pretrained(old, dtype="auto")
    ours = generation.VLLMGeneration(
        model,
        Accelerator(cpu=True),
        processing_class=None,
        gpu_memory_utilization=OPTIONS["gpu_memory_utilization"],
        max_model_length=OPTIONS["max_model_len"],
        max_num_seqs=4,
    )
    engine = Engine(ours.llm)
    expected, digest = engine.of_files(new, "new")
    before, _ = engine.of_files(old, "old")
    ours.model = AutoModelForCausalLM.from_pretrained(new, dtype="auto")
    if sleeps:
        engine.allow_sleep()
        ours.enable_sleep_mode = True
        ours.llm.sleep(level=2)
    ours.sync_weights()
    if sleeps:
        ours.llm.wake_up(tags=["kv_cache"])
    tokens = engine.says()
    tell(
        engine.served()
        | {"digest of files": digest, "is new": before != tokens == expected}
    )


def online_dpo(sleeps: str, old: str, folder: str) -> None:
    """TRL's `OnlineDPOTrainer` trains, and sends its model before each rollout."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = import_module("trl.experimental.online_dpo.online_dpo_trainer")
    config = import_module("trl.experimental.online_dpo.online_dpo_config")
    small(module)
    tokenizer = AutoTokenizer.from_pretrained(old)
    args = config.OnlineDPOConfig(
        output_dir=folder,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=OPTIONS["gpu_memory_utilization"],
        max_steps=3,
        per_device_train_batch_size=2,
        max_length=64,
        max_new_tokens=16,
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = module.OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(old, dtype="auto"),
        reward_funcs=lambda completions, **_: [float(len(set(c))) for c in completions],
        args=args,
        train_dataset=[{"prompt": f"hello {number}"} for number in range(8)],
        processing_class=tokenizer,
    )
    engine = Engine(trainer.llm)
    if sleeps:
        engine.allow_sleep()
        args.vllm_enable_sleep_mode = True
    rollouts = engine.labelled()
    trainer.train()
    # What it does before its next rollout.
    if sleeps:
        engine.llm.wake_up(tags=["weights"])
    trainer._move_model_to_vllm()
    if sleeps:
        engine.llm.wake_up(tags=["kv_cache"])
    trained, labels = engine.served(), list(rollouts)
    tokens = engine.says()
    trainer.model.save_pretrained(folder)
    expected, digest = engine.of_files(folder, "files")
    before, _ = engine.of_files(old, "old")
    tell(
        trained
        | {"rollouts": labels, "digest of files": digest}
        | {"is new": before != tokens == expected}
    )


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    OWN["trl"].use()
    run = {"sampled": sampled, "colocated": colocated, "online_dpo": online_dpo}
    run[sys.argv[1]](*sys.argv[2:])
