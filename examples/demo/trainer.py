"""The trainer: rollouts from the live server, a step, a version; and again.

`python -m examples.demo.trainer CHECKPOINT`, ordered about by arm.py. Told to `keep`
the server's weights it does everything but publish: that is the control.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import torch

from examples.demo import child
from examples.demo.learning.gradient import Batch, policy_loss
from examples.demo.learning.model import load
from examples.demo.rollout import Group, Rollouts
from vllm.inflight.trainer import Outcome, Publisher

GROUP_SIZE = 16
GROUPS_PER_STEP = 16
GROUPS_AT_ONCE = 8
"""Half a batch is sampled ahead, while the optimiser works."""

LEARNING_RATE = 2e-4
WARM_UP_STEPS = 5


class Trainer:
    """Model and optimiser, from one checkpoint."""

    def __init__(self, checkpoint: Path, learning_rate: float = LEARNING_RATE) -> None:
        self.model = load(checkpoint).train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0
        )
        # Adam divides by what it has seen, and at first that is next to nothing.
        self._warm_up = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS),
        )

    def step(self, groups: list[Group], epoch: int) -> dict[str, float]:
        """One optimiser step; returns what it was learned from."""
        loss, facts = policy_loss(self.model, Batch.of(groups, epoch))
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._warm_up.step()
        samples = [sample for group in groups for sample in group]
        return facts | {
            "reward": statistics.fmean(sample.reward for sample in samples),
            "spanning": statistics.fmean(len(set(s.epochs)) > 1 for s in samples),
        }


class Line:
    """The line of versions to the server: one is under way while the next is made.

    The publisher has its snapshot when `send` returns, so rollouts are taken while
    the server stages and commits. Those that are being sampled then go on, and
    have tokens of both versions.
    """

    def __init__(self, url: str, epoch: int, publisher: Publisher) -> None:
        self.epoch = epoch
        """The newest that is known to be served."""
        self._url = url
        self._publisher = publisher
        self._sent: tuple[float, Future[Outcome]] | None = None

    def send(self, step: int) -> None:
        """Publish the weights of this step."""
        began = time.time()
        future = self._publisher.publish(f"step-{step}", step=step, block=False)
        self._sent = began, future

    def await_commit(self) -> None:
        """Return once the version sent last is served; report it."""
        if self._sent is None:
            return
        (began, future), self._sent = self._sent, None
        outcome = future.result()
        served = httpx.get(f"{self._url}/weight_info").raise_for_status().json()
        assert outcome.epoch is not None and outcome.epoch == served["epoch"]
        self.epoch = outcome.epoch
        child.report(
            "commit",
            version=outcome.version,
            epoch=outcome.epoch,
            began=began,
            committed_at=served["committed_at"],
            gap_ms=outcome.gap_ms,
            is_delta=outcome.is_delta,
            num_bytes=outcome.num_bytes,
            seconds=dict(outcome.seconds),
        )


def train(checkpoint: Path, order: dict[str, Any]) -> None:
    """One run from the checkpoint against the live server, reported step by step.

    Args:
        order: `url`, `epoch` (the one now served), `steps`, `seed`, and `keep`:
            whether the server is to keep its weights.

    """
    trainer = Trainer(checkpoint)
    rollouts = Rollouts(
        order["url"],
        group_size=GROUP_SIZE,
        num_at_once=GROUPS_AT_ONCE,
        seed=order["seed"],
    )
    with (
        closing(rollouts),
        # At this learning rate a delta has more than a quarter of the version's bytes,
        # which is where `auto` sends it whole.
        Publisher(order["url"], trainer.model, delta="always") as publisher,
    ):
        line = Line(order["url"], order["epoch"], publisher)
        for step in range(1, order["steps"] + 1):
            began = time.time()
            groups = rollouts.take(GROUPS_PER_STEP)
            line.await_commit()
            taken = time.time()
            facts = trainer.step(groups, line.epoch)
            if not order["keep"]:
                line.send(step)
            seconds = {"rollouts": taken - began, "optimiser": time.time() - taken}
            child.report("step", step=step, seconds=seconds, **facts)
        line.await_commit()
    child.report("done")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    folder = parser.parse_args().checkpoint
    # One core: the other one is the server's.
    torch.set_num_threads(1)
    for order in child.orders(at_end=child.end_at_once):
        train(folder, order)
