"""What real steps of an optimiser change: `python -m benchmarks.delta.steps`.

A model learns the text of this repository: first at a high rate, then, from there
again and again, at each learning rate of the benchmark. After each step its bf16
weights are compared with those of the step before, and of 8 and 32 steps before. So are
the FP8 and int8 checkpoints that are made from them, after every tenth step. With
`--every 5`, only each fifth step is compared with the one before.

It needs torch alone; with `--coded` also this package and its native core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.delta.changes import coded, compared
from benchmarks.delta.model import SIZES
from benchmarks.delta.quantised import checkpoint
from benchmarks.delta.training import Tensors, Training

RATES = (1e-6, 1e-5, 1e-4)
TRAINED_AT = 3e-4
WARM_STEPS = 6
"""Steps at each learning rate before the first that counts: AdamW's moments settle."""
APART = (1, 8, 32)
"""How many steps lie between two versions."""
QUANTISED_EVERY = 10
QUANTISED = ("fp8", "int8")
WINDOWS = (10, 100)
"""Steps at which the figures are summed up anew: the first 10, up to 100, the rest."""


def measured(
    options: argparse.Namespace, keep: Callable[[dict[str, Any]], object] = id
) -> dict[str, Any]:
    """The figures of every learning rate; `keep` gets them after each one."""
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    training = Training(SIZES[options.size], device)
    training.begin(TRAINED_AT)
    for number in range(options.train_steps):
        loss = training.step(options.batch, options.length)
        if number % 10 == 0:
            print(f"training: step {number}, loss {loss:.3f}", flush=True)
    trained = {name: t.detach().clone() for name, t in training.master.items()}
    found: dict[str, Any] = {
        "size": options.size,
        "parameters": sum(t.numel() for t in trained.values()),
        "tokens": len(training.tokens),
        "tokens_of_a_step": options.batch * options.length,
        "trained_steps": options.train_steps,
        "trained_loss": loss,
    }
    for rate in options.rates:
        training.master = {name: t.clone() for name, t in trained.items()}
        training.begin(rate)
        for _ in range(WARM_STEPS):
            training.step(options.batch, options.length)
        began = time.perf_counter()
        found[f"{rate:g}"] = of_rate(training, options)
        seconds = time.perf_counter() - began
        share = found[f"{rate:g}"]["apart 1"]["all"]["share"]
        keep(found)
        print(f"{rate:g}: {share:.3%} changed, {seconds:.0f} s", flush=True)
    return found


def of_rate(training: Training, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one learning rate."""
    before = {apart: training.weights() for apart in APART if apart <= options.steps}
    rows: dict[str, list[dict[str, Any]]] = {}
    losses: list[float] = []
    for number in range(1, options.steps + 1):
        losses.append(training.step(options.batch, options.length))
        now = training.weights()
        for apart, old in before.items():
            if number % apart:
                continue
            if apart > 1 or number % options.every == 0:
                some = rows.setdefault(f"apart {apart}", [])
                some.append(row(old, now, options.coded))
            if apart == 1 and number % QUANTISED_EVERY == 0:
                for kind in QUANTISED:
                    pair = checkpoint(old, kind), checkpoint(now, kind)
                    rows.setdefault(kind, []).append(row(*pair, options.coded))
            before[apart] = now
    ends = losses[:10], losses[-10:]
    report: dict[str, Any] = {"loss": [median(some) for some in ends]}
    for name, some in rows.items():
        report[name] = summary(some)
        report[name]["shares"] = [round(each["share"], 6) for each in some]
    return report


def row(old: Tensors, new: Tensors, is_coded: bool) -> dict[str, Any]:
    """The figures of one pair of versions."""
    found = compared(old, new)
    return found | (coded(old, new, found) if is_coded else {})


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of all rows, and of the steps of each window."""
    edges = [0, *(edge for edge in WINDOWS if edge < len(rows)), len(rows)]
    report: dict[str, Any] = {"all": _median(rows)}
    if len(edges) > 2:
        for first, end in pairwise(edges):
            report[f"{first + 1} to {end}"] = _median(rows[first:end])
    return report


def _median(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    return median(values)


def add_options(parser: argparse.ArgumentParser, *, size: str, steps: int) -> None:
    """The options of `measured`."""
    parser.add_argument("--size", choices=SIZES, default=size)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--steps", type=int, default=steps, help="at each rate")
    parser.add_argument(
        "--every", type=int, default=1, help="of the steps are compared with the last"
    )
    parser.add_argument("--train-steps", type=int, default=60, help="before")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument(
        "--coded", action="store_true", help="also code the deltas with this package"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/bench/delta-steps.json"))
    add_options(parser, size="110M", steps=300)
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report: dict[str, Any] = {"torch": torch.__version__, "device": name}
    report["options"] = {k: str(v) for k, v in vars(options).items() if k != "out"}
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(found: dict[str, Any]) -> None:
        options.out.write_text(json.dumps(report | found, indent=1) + "\n")

    measured(options, keep)


if __name__ == "__main__":
    main()
