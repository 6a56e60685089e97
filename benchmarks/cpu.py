"""Updating weights while decoding, ours beside upstream's: `python -m benchmarks.cpu`.

Two engines of one model take turns on the machine, each in its own processes. One has
vllm-inflight and is updated while it decodes. The other has not, and is updated in
upstream's way (pause, update, resume). Both have the same streams and files. The
benchmark measures the time between two tokens as a client sees it; docs/performance.md
explains the figures.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint import make_checkpoint, num_parameters
from benchmarks.figures import summary, update_figures
from benchmarks.machine import facts
from benchmarks.process import ArmProcess, arm
from benchmarks.record import OURS, UPSTREAM, Plan, Record

OUT = Path("out/bench")
ROWS = {
    "tokens_per_s": ("decoding alone, tokens/s", "{:.0f}"),
    "gap_steady_p50_ms": ("gap, decoding alone: p50, ms", "{:.1f}"),
    "gap_steady_p99_ms": ("gap, decoding alone: p99, ms", "{:.1f}"),
    "gap_steady_max_ms": ("gap, decoding alone: max, ms", "{:.1f}"),
    "gap_alone_median_ms": ("largest gap of as long without one: median, ms", "{:.1f}"),
    "gap_update_median_ms": ("largest gap at an update: median, ms", "{:.1f}"),
    "gap_update_max_ms": ("largest gap at an update: worst, ms", "{:.1f}"),
    "tokens_share": ("tokens/s during an update, of decoding alone", "{:.1%}"),
    "update_s": ("from call to return, s", "{:.2f}"),
    "lost_s": ("decoding lost to an update, s", "{:.2f}"),
}

console = Console()


def measure(options: argparse.Namespace, checkpoints: list[Path]) -> list[ArmProcess]:
    """Both arms in turns, the order changing from round to round."""
    names = [str(path.resolve()) for path in checkpoints]
    next_names = cycle([names[1], names[0]])

    def started(name: str) -> AbstractContextManager[ArmProcess]:
        return arm(name, "benchmarks.arm", checkpoints[0], OUT / f"{name}.log")

    def plan(num_updates: int, steady_s: float) -> Plan:
        chosen = [next(next_names) for _ in range(num_updates)]
        return Plan(options.streams, options.warm_tokens, steady_s, chosen)

    with started(OURS) as ours, started(UPSTREAM) as upstream:
        arms = [ours, upstream]
        for number in range(options.rounds + 1):
            warm_up = number == 0
            this = plan(2, 0.5) if warm_up else plan(options.updates, options.steady)
            for each in arms if number % 2 else arms[::-1]:
                record = each.carry_out(this)
                if warm_up:
                    each.records.clear()
                    each.others.clear()
                else:
                    console.print(f"[dim]round {number}, {each.name}: {_line(record)}")
            probes = {tuple(each.records[-1].probe) for each in arms if each.records}
            if len(probes) > 1:
                raise SystemExit("the arms decode differently after the same update")
        return arms


def _line(record: Record) -> str:
    return ", ".join(
        f"{u.seconds:.2f} s, gap {u.gap_max_ms:.0f} ms (alone {u.gap_alone_ms:.0f})"
        for u in update_figures(record)
    )


def show(report: dict[str, Any]) -> None:
    """The table."""
    table = Table(
        title=f"{report['updates']} updates of {report['bytes'] / 1e6:.0f} MB"
    )
    for heading in ("", OURS, UPSTREAM):
        table.add_column(heading, justify="right" if heading else "left")
    for key, (label, style) in ROWS.items():
        table.add_row(
            label, *(style.format(report[name][key]) for name in (OURS, UPSTREAM))
        )
    console.print(table)
    console.print(
        f"Largest gap at an update, upstream's over ours: {report['gap_ratio']:.1f} "
        f"(medians: {report['gap_ratio_median']:.1f}). Other processes kept "
        f"{report['machine']['others_cores']:.2f} of {report['machine']['cores']} "
        "cores busy."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=2, help="per arm and round")
    parser.add_argument("--steady", type=float, default=4.0, help="seconds around each")
    parser.add_argument("--warm-tokens", type=int, default=160)
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    checkpoints = [OUT / "checkpoints" / f"seed-{seed}" for seed in (1, 2)]
    sizes = {make_checkpoint(path, seed) for seed, path in enumerate(checkpoints, 1)}
    started = time.monotonic()
    arms = measure(options, checkpoints)
    report: dict[str, Any] = {each.name: summary(each.records) for each in arms}
    ours, upstream = report[OURS], report[UPSTREAM]
    report |= {
        "gap_ratio": upstream["gap_update_max_ms"] / ours["gap_update_max_ms"],
        "gap_ratio_median": (
            upstream["gap_update_median_ms"] / ours["gap_update_median_ms"]
        ),
        "parameters": num_parameters(),
        "bytes": sizes.pop(),
        "streams": options.streams,
        "updates": len(ours["updates"]),
        "seconds": time.monotonic() - started,
        "machine": facts()
        | {"others_cores": max(busy for each in arms for busy in each.others)},
    }
    (OUT / "cpu.json").write_text(json.dumps(report, indent=1) + "\n")
    show(report)

    from benchmarks.chart import draw

    draw({each.name: each.records for each in arms}, report, OUT / "cpu.png")
    console.print(f"Written: {OUT}/cpu.json and {OUT}/cpu.png")


if __name__ == "__main__":
    main()
