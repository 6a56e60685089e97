"""The policy gradient: GRPO, corrected token by token for who sampled it.

A token's weight is `p_now / p_then`, truncated from above. `p_then` is the probability
that the server reported, under the version that sampled the token. Tokens of too old
versions are left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.demo.learning.alphabet import PAD
from examples.demo.rollout import Group

MAX_RATIO = 2.0
MAX_AGE = 4
"""Epochs after which a token is no longer learned from."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as tensors [sample, position]; positions are of answer tokens."""

    tokens: torch.Tensor
    """[sample, prompt and answer]; padded behind the answer."""
    first: int
    """The position where answers begin."""
    logprobs: torch.Tensor
    advantages: torch.Tensor
    ages: torch.Tensor
    """Epochs between the newest version and the one that sampled the token."""
    answered: torch.Tensor
    """1 where there is an answer token, 0 in the padding."""

    @classmethod
    def of(cls, groups: Sequence[Group], epoch: int) -> Batch:
        """A batch seen from `epoch`, the newest version that is served."""
        samples = [sample for group in groups for sample in group]
        first = len(samples[0].prompt)
        width = max(len(sample.tokens) for sample in samples)

        def padded(rows: list[list[Any]], value: float) -> torch.Tensor:
            return torch.tensor([row + [value] * (width - len(row)) for row in rows])

        prompts = torch.tensor([sample.prompt for sample in samples])
        answers = padded([sample.tokens for sample in samples], PAD)
        advantages = [value for group in groups for value in advantages_of(group)]
        return cls(
            tokens=torch.cat([prompts, answers], 1),
            first=first,
            logprobs=padded([sample.logprobs for sample in samples], 0.0),
            advantages=torch.tensor(advantages)[:, None],
            ages=epoch - padded([sample.epochs for sample in samples], epoch),
            answered=padded([[1.0] * len(s.tokens) for s in samples], 0.0),
        )


def advantages_of(group: Group) -> list[float]:
    """How much better each answer is than its group, in standard deviations."""
    rewards = [sample.reward for sample in group]
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (spread + 1e-4) for reward in rewards]


def policy_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a batch, and facts about its correction."""
    logits = model(batch.tokens[:, :-1]).logits[:, batch.first - 1 :]
    answers = batch.tokens[:, batch.first :, None]
    logprobs = logits.log_softmax(-1).gather(2, answers)[..., 0]
    learned = batch.answered * (batch.ages <= MAX_AGE)
    ratios = (logprobs.detach() - batch.logprobs).exp()
    weights = ratios.clamp(max=MAX_RATIO) * learned
    # Divided by all answer tokens: leaving some out must not make others louder.
    num_tokens = batch.answered.sum()
    loss = -(weights * batch.advantages * logprobs).sum() / num_tokens
    facts = {
        "age": (batch.ages * batch.answered).sum() / num_tokens,
        "ratio": (ratios * batch.answered).sum() / num_tokens,
        "truncated": ((ratios > MAX_RATIO) * learned).sum() / num_tokens,
        "left_out": 1 - learned.sum() / num_tokens,
    }
    return loss, {name: float(value) for name, value in facts.items()}
