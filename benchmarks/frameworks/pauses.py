"""Frameworks' pauses, obeyed and absorbed: `python -m benchmarks.frameworks.pauses`.

Two engines of one model take turns on the machine. One obeys pauses and the other
absorbs them. Both get the same calls: those that TRL, OpenRLHF, prime-rl, SkyRL and
PipelineRL make around an update. The benchmark measures the longest gap between two
tokens at each update, as a client sees it.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import make_checkpoint, num_parameters
from benchmarks.figures import UpdateFigures, steady, update_figures
from benchmarks.frameworks.pauses_arm import SEQUENCES
from benchmarks.machine import facts
from benchmarks.process import ArmProcess, arm
from benchmarks.record import Plan

OUT = Path("out/bench")
OBEY, ABSORB = "obey", "absorb"
ARMS = (OBEY, ABSORB)

console = Console()


def measure(options: argparse.Namespace, checkpoints: list[Path]) -> list[ArmProcess]:
    """Both arms in turns; a round has one update by each framework."""
    folders = cycle(str(path.resolve()) for path in checkpoints[::-1])

    def started(name: str) -> AbstractContextManager[ArmProcess]:
        module = "benchmarks.frameworks.pauses_arm"
        return arm(name, module, checkpoints[0], OUT / f"pauses-{name}.log")

    with started(OBEY) as obeying, started(ABSORB) as absorbing:
        arms = [obeying, absorbing]
        for number in range(options.rounds + 1):
            plan = Plan(
                options.streams,
                options.warm_tokens,
                options.steady,
                [f"{framework}={next(folders)}" for framework in SEQUENCES],
            )
            for each in arms if number % 2 else arms[::-1]:
                record = each.carry_out(plan)
                if number == 0:  # to warm up
                    each.records.clear()
                    each.others.clear()
                    continue
                gaps = [f"{u.gap_max_ms:.0f}" for u in update_figures(record)]
                console.print(f"[dim]round {number}, {each.name}: {', '.join(gaps)} ms")
            if len({tuple(a.records[-1].probe) for a in arms if a.records}) > 1:
                raise SystemExit("the arms decode differently after the same update")
        return arms


def figures(arms: list[ArmProcess]) -> dict[str, dict[str, dict[str, float]]]:
    """Framework → arm → its figures over all rounds."""
    found: dict[str, dict[str, list[UpdateFigures]]] = {}
    for each in arms:
        for record in each.records:
            of_round = update_figures(record)
            for framework, update in zip(SEQUENCES, of_round, strict=True):
                by_arm = found.setdefault(framework, {})
                by_arm.setdefault(each.name, []).append(update)
    return {
        framework: {
            name: {
                "gap_median_ms": median(u.gap_max_ms for u in updates),
                "gap_max_ms": max(u.gap_max_ms for u in updates),
                "update_s": median(u.seconds for u in updates),
                "tokens_share": median(u.tokens_share for u in updates),
                "lost_s": median(u.lost_s for u in updates),
            }
            for name, updates in by_arm.items()
        }
        for framework, by_arm in found.items()
    }


def show(report: dict[str, Any]) -> None:
    """The table."""
    table = Table(title=f"longest gap at an update of {report['bytes'] / 1e6:.0f} MB")
    for heading in ("", *(f"{name}: median / worst, ms" for name in ARMS)):
        table.add_column(heading, justify="right" if heading else "left")
    for framework, by_arm in report["frameworks"].items():
        cells = [
            f"{by_arm[name]['gap_median_ms']:.0f} / {by_arm[name]['gap_max_ms']:.0f}"
            for name in ARMS
        ]
        table.add_row(framework, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steady", type=float, default=5.0, help="seconds around each")
    parser.add_argument("--warm-tokens", type=int, default=40)
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    checkpoints = [OUT / "checkpoints" / f"seed-{seed}" for seed in (1, 2)]
    sizes = {make_checkpoint(path, seed) for seed, path in enumerate(checkpoints, 1)}
    started = time.monotonic()
    arms = measure(options, checkpoints)
    report: dict[str, Any] = {
        "frameworks": figures(arms),
        "steady": {each.name: steady(each.records) for each in arms},
        "parameters": num_parameters(),
        "bytes": sizes.pop(),
        "streams": options.streams,
        "rounds": options.rounds,
        "seconds": time.monotonic() - started,
        "machine": facts()
        | {"others_cores": max(busy for each in arms for busy in each.others)},
    }
    (OUT / "framework-pauses.json").write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    console.print(f"Written: {OUT}/framework-pauses.json")


if __name__ == "__main__":
    main()
