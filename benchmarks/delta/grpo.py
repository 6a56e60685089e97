"""What steps of GRPO change: `python -m benchmarks.delta.grpo`, on a CPU.

The demo's trainer learns from rollouts of a live server, to which it publishes every
step. From one checkpoint it does so at each learning rate. The weights are in float32;
after each step they are compared in bf16 with those of the step before.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.delta.changes import Tensors
from benchmarks.delta.steps import row, summary
from examples.demo.learning import model as models
from examples.demo.rollout import Rollouts
from examples.demo.server import Server
from examples.demo.trainer import (
    GROUP_SIZE,
    GROUPS_AT_ONCE,
    GROUPS_PER_STEP,
    LEARNING_RATE,
    WARM_UP_STEPS,
    Trainer,
)
from vllm.inflight.trainer import Publisher

RATES = (1e-6, 1e-5, LEARNING_RATE)


def rounded(trainer: Trainer) -> Tensors:
    """The weights of now in bf16, without the tied head."""
    named = trainer.model.named_parameters()
    return {name: param.detach().to(torch.bfloat16) for name, param in named}


def of_rate(folder: Path, url: str, rate: float, steps: int) -> dict[str, Any]:
    """The figures of so many steps after those in which the rate rises."""
    trainer = Trainer(folder, rate)
    sizes = {"group_size": GROUP_SIZE, "num_at_once": GROUPS_AT_ONCE}
    rows, rewards = [], []
    with (
        closing(Rollouts(url, seed=0, **sizes)) as rollouts,
        Publisher(url, trainer.model, wire="shm") as publisher,
    ):
        outcome = publisher.publish()
        for number in range(WARM_UP_STEPS + steps):
            before = rounded(trainer)
            facts = trainer.step(rollouts.take(GROUPS_PER_STEP), outcome.epoch or 0)
            outcome = publisher.publish(step=number)
            if number >= WARM_UP_STEPS:
                rows.append(row(before, rounded(trainer), is_coded=True))
                rewards.append(facts["reward"])
    return summary(rows) | {
        "rewards": [round(reward, 3) for reward in rewards],
        "shares": [round(each["share"], 6) for each in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--steps", type=int, default=30, help="at each rate")
    parser.add_argument("--pretrain-steps", type=int, default=models.PRETRAIN_STEPS)
    parser.add_argument("--out", type=Path, default=Path("out/bench/delta-grpo.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # the other core is the server's
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"torch": torch.__version__, "steps": options.steps}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = models.make_model(0)
        models.pretrain(model, 0, options.pretrain_steps, lambda *_: None)
        models.save(model, folder)
        report["parameters"] = sum(param.numel() for param in model.parameters())
        log = options.out.with_suffix(".log")
        server = stack.enter_context(Server(folder, log))
        server.await_ready()
        for rate in options.rates:
            found = of_rate(folder, server.url, rate, options.steps)
            report[f"{rate:g}"] = found
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"{rate:g}: {found['all']['share']:.3%} changed", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
