"""The demo's trainer in float32 sends deltas to an engine that serves bfloat16."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config.weight_transfer import WeightTransferConfig

from examples.demo.learning import model as models
from examples.demo.learning.alphabet import encode
from examples.demo.rollout import Group, Sample
from examples.demo.trainer import Trainer
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

NUM_STEPS = 5
PROMPTS = ["52817>", "90314>", "66120>"]


def groups(seed: int) -> list[Group]:
    """Rollouts as a server could have sampled them."""
    of = random.Random(seed)

    def sample(prompt: str) -> Sample:
        tokens = encode("".join(of.choices("0123456789", k=5)))
        logprobs = [-of.random() for _ in tokens]
        return Sample(encode(prompt), tokens, logprobs, [0] * len(tokens), of.random())

    return [[sample(prompt) for _ in range(4)] for prompt in PROMPTS]


def said(llm: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": encode(prompt)} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_what_the_demos_trainer_has_sent_is_what_a_fresh_engine_says(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    folder = models.save(models.make_model(0), tmp_path / "first")
    trainer = Trainer(folder)
    local = WeightTransferConfig(backend="local")
    llm = start(folder, weight_transfer_config=local, dtype="bfloat16")
    first, outcomes = said(llm), []
    with Publisher(llm, trainer.model, delta="always") as publisher:
        for step in range(1, NUM_STEPS + 1):
            trainer.step(groups(step), epoch=0)
            outcomes.append(publisher.publish(f"step-{step}", step=step))
    assert [one.is_delta for one in outcomes] == [False, False, True, True, True]
    whole = outcomes[1].num_bytes
    assert outcomes[0].num_bytes == 2 * whole
    assert all(2 * outcome.num_bytes < whole for outcome in outcomes[2:])
    found = said(llm)
    assert found != first
    last = models.save(trainer.model, tmp_path / "last")
    assert found == said(start(last, weight_transfer_config=local, dtype="bfloat16"))
