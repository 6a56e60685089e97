"""Decoding alone on one GPU: ours, ours without shadow weights, and plain vLLM.

`python -m benchmarks.gpu.steady [--shape 8B] [--turns 6]`. Three engines live on one
GPU and decode in turns, so that other load of the machine hits all of them. No weights
change. Each turn gives the ratio of a rate to upstream's; the result is the median over
all turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.figures import steady
from benchmarks.gpu.staging_arm import ALONE
from benchmarks.machine import facts
from benchmarks.process import ArmProcess, arm
from benchmarks.record import OURS, UPSTREAM, Plan
from benchmarks.shapes import SHAPES, write_shape

ARMS = OURS, ALONE, UPSTREAM

console = Console()


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """The figures of every arm."""
    folder = write_shape(options.shape, root)
    plan = Plan(options.streams, 64, options.seconds, [])
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def begin(number: int) -> ArmProcess:
            log = options.out / f"gpu-steady-{number}.log"
            context = arm(ARMS[number], "benchmarks.gpu.staging_arm", folder, log)
            return stack.enter_context(context)

        processes = list(pool.map(begin, range(len(ARMS))))
        for process in processes:
            process.carry_out(plan)
            process.records.clear()
        for turn in range(options.turns):
            # There and back, so that nobody always follows the same one.
            for process in processes if turn % 2 else reversed(processes):
                record = process.carry_out(plan)
                rates[process.name].append(steady([record])["tokens_per_s"])
            of_upstreams = {
                name: rates[name][-1] / rates[UPSTREAM][-1] for name in ARMS
            }
            console.print(" ".join(f"{n}: {r:.2%}" for n, r in of_upstreams.items()))
        found = {process.name: steady(process.records) for process in processes}
    return {
        name: found[name]
        | {"share": median(map(truediv, rates[name], rates[UPSTREAM]))}
        | {"rates": rates[name]}
        for name in ARMS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        report = {"machine": facts(), "arms": measure(options, Path(root))}
    for name, found in report["arms"].items():
        console.print(
            f"{name}: {found['tokens_per_s']:.0f} tok/s, {found['share']:.2%}"
        )
    (options.out / "gpu-steady.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
