"""Rollouts that live through updates, and the importance ratio of every token.

    python -m examples.partial_rollouts

The version span of a token names the version that sampled it, and the engine returns
its log-probability under that version. The trainer computes its log-probability under
the newest weights. An off-policy correction needs the ratio of the two. It is 1 for
tokens of the newest version, if all KV that they attended to is of that version too.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from typing import Any

# The engine steps in this process, so that an update comes at a given token.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Attention on a GPU would round float32 to TF32, and no ratio would be 1.
os.environ["TRITON_F32_DEFAULT"] = "ieee"

import torch
from vllm import LLM, SamplingParams

from examples.tiny_model import PROMPT, Trainer, make_checkpoint

NUM_ROLLOUTS = 4
NUM_TOKENS = 240
STEPS = (40, 20, 20)
"""Of training: before the rollouts, and twice in their middle."""


def roll_out(llm: Any, trainer: Trainer, mode: str, folder: str) -> list[Any]:
    """Generate rollouts, and publish twice meanwhile."""
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    for index in range(NUM_ROLLOUTS):
        engine.add_request(f"{mode}-{index}", PROMPT, params)
    done: list[Any] = []
    num_steps = 0
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
        num_steps += 1
        if num_steps in (NUM_TOKENS // 3, 2 * NUM_TOKENS // 3):
            trainer.train(STEPS[num_steps * 3 // NUM_TOKENS])
            publish(llm, trainer, folder, mode)
    return done


def publish(llm: Any, trainer: Trainer, folder: str, mode: str) -> None:
    """Publish the trainer's current weights as a checkpoint."""
    trainer.model.save_pretrained(folder)
    llm.update_weights_from_disk(folder, f"step-{trainer.step}", mode=mode)


@torch.inference_mode()
def ratios(trainer: Trainer, rollout: Any) -> dict[str, list[float]]:
    """π_now / π_then of every token, by the version that sampled it."""
    output = rollout.outputs[0]
    prompt, tokens = list(rollout.prompt_token_ids), list(output.token_ids)
    logits = trainer.model(torch.tensor([prompt + tokens])).logits[0]
    now = logits[len(prompt) - 1 : -1].log_softmax(-1)
    found: dict[str, list[float]] = defaultdict(list)
    for span in output.weight_versions:
        for index in range(span.start, span.end):
            token = tokens[index]
            then = output.logprobs[index][token].logprob
            found[span.version].append((now[index, token] - then).exp().item())
    return found


def main() -> None:
    """Run once with the KV of running rollouts kept, once with it recomputed."""
    with tempfile.TemporaryDirectory() as served, tempfile.TemporaryDirectory() as sent:
        trainer = Trainer(make_checkpoint(served))
        llm = LLM(
            served,
            dtype="float32",
            enforce_eager=True,
            gpu_memory_utilization=0.3,
            async_scheduling=False,  # each step returns its tokens
        )
        for mode in ("in_place", "retract"):
            trainer.train(STEPS[0])
            publish(llm, trainer, sent, "in_place")
            found: dict[str, list[float]] = defaultdict(list)
            for rollout in roll_out(llm, trainer, mode, sent):
                for version, values in ratios(trainer, rollout).items():
                    found[version] += values
            print(f"{mode}:")
            for version, values in found.items():
                off = max(abs(value - 1) for value in values)
                mean = sum(values) / len(values)
                print(
                    f"  {version}: {len(values)} tokens, mean ratio {mean:.3f}, "
                    f"farthest from 1: {off:.4f}"
                )


if __name__ == "__main__":
    main()
