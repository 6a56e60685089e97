"""The exam: held-out prompts, answered by the live server, once each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import httpx

from examples.demo.learning import task
from examples.demo.learning.alphabet import decode
from examples.demo.results.interval import Interval, wilson
from examples.demo.rollout import TIMEOUT_S, completion, to_samples

NUM_PROMPTS = 512
PROMPTS_AT_ONCE = 128
SEED = 20_000
"""The same prompts for every run, whatever its seed."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What an exam has shown."""

    reward: Interval
    epochs: list[int]
    """Every epoch that had a part in the answers."""
    answers: dict[str, str]
    """Prompt and answer, for the first few prompts."""


def examine(url: str, count: int = NUM_PROMPTS) -> Marks:
    """Answers sampled at temperature 1, as in training; nothing else is running."""
    prompts = task.draw_exam(random.Random(SEED), count)
    rewards: list[float] = []
    epochs: set[int] = set()
    answers: dict[str, str] = {}
    for start in range(0, count, PROMPTS_AT_ONCE):
        asked = prompts[start : start + PROMPTS_AT_ONCE]
        for prompt, choice in zip(asked, _choices(url, asked), strict=True):
            (sample,) = to_samples(prompt, {"choices": [choice]})
            rewards.append(sample.reward)
            epochs.update(sample.epochs)
            answers[prompt] = decode(sample.tokens) or "?"
    few = dict(list(answers.items())[:8])
    return Marks(wilson(sum(rewards), count), sorted(epochs), few)


def _choices(url: str, prompts: list[str]) -> list[dict[str, Any]]:
    body = completion(prompts, logprobs=0)
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    choices = reply.raise_for_status().json()["choices"]
    return sorted(choices, key=lambda choice: choice["index"])
