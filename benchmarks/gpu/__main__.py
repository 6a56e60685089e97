"""Updating weights over NCCL while decoding, ours beside upstream's, on two GPUs.

`python -m benchmarks.gpu [--shapes 0.6B 8B 14B 32B]`. One engine runs on GPU 0
(32B: on GPUs 0 and 1, unless `--ranks` is given), a trainer on the next GPU. With
`--ranks`, `--engine` says how many of them are for data or pipeline parallelism. The
first arm has vllm-inflight and is updated while it decodes. The second arm has not, and
is updated in upstream's way (pause, update, resume). Both have random weights of the
named shape, vLLM's defaults, the same streams and the same trainer interface.
docs/performance.md explains the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import summary, update_figures
from benchmarks.machine import facts
from benchmarks.process import arm
from benchmarks.record import OURS, UPSTREAM, Plan, Record
from benchmarks.shapes import GIVEN_RANKS, SHAPES, require_gpus, write_shape

ROWS = {
    "tokens_per_s": ("decoding alone, tokens/s", "{:.0f}"),
    "gap_steady_p50_ms": ("gap, decoding alone: p50, ms", "{:.2f}"),
    "gap_steady_p99_ms": ("gap, decoding alone: p99, ms", "{:.2f}"),
    "gap_steady_max_ms": ("gap, decoding alone: max, ms", "{:.2f}"),
    "gap_update_median_ms": ("largest gap at an update: median, ms", "{:.2f}"),
    "gap_update_max_ms": ("largest gap at an update: worst, ms", "{:.2f}"),
    "missed": ("updates beyond 2 x the steady largest gap", "{:.0f}"),
    "tokens_share": ("tokens/s during an update, of decoding alone", "{:.1%}"),
    "update_s": ("from call to return, s", "{:.3f}"),
    "wire_ms": ("of that waiting for the wire: median, ms", "{:.0f}"),
    "flip_ms": ("flip: median, ms", "{:.3f}"),
    "commit_ms": ("switch in the engine core: median, ms", "{:.2f}"),
}
NO_FIGURE = "-"

console = Console()


def measure(shape: str, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The figures of both arms on one shape, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(shape, Path(folder))
        for name in options.arms:
            log = options.out / f"gpu-{shape}-{name}.log"
            started = time.monotonic()
            with arm(name, "benchmarks.gpu.arm", path, log) as process:
                console.print(
                    f"{shape} {name}: up in {time.monotonic() - started:.0f} s"
                )
                # At the first of these the model's loaders are recorded.
                first = process.carry_out(plan(options, 2))
                console.print(f"[dim]{name}, the first: {_line(first)}")
                process.records.clear()
                for _ in range(options.rounds):
                    record = process.carry_out(plan(options, options.updates))
                    console.print(f"[dim]{name}: {_line(record)}")
            found = figures(process.records)
            yield name, found | {"first": [asdict(u) for u in update_figures(first)]}


def plan(options: argparse.Namespace, num_updates: int) -> Plan:
    """A round: its streams, and the number of versions sent while they decode."""
    return Plan(options.streams, 64, options.steady, [""] * num_updates)


def figures(records: list[Record]) -> dict[str, Any]:
    """The figures of the CPU benchmark, and the engine's report of its commits."""
    found = summary(records)
    bar = 2 * found["gap_steady_max_ms"]
    found["missed"] = sum(u["gap_max_ms"] > bar for u in found["updates"])
    told = [u.facts for record in records for u in record.updates if u.facts]
    if told:
        found["flip_ms"] = 1e3 * median(each["flip"] for each in told)
        found["commit_ms"] = median(each["commit_ms"] for each in told)
        found["wire_ms"] = 1e3 * median(each.get("wire", 0.0) for each in told)
        # What the engine says of an update's time, by its phases.
        found["phases_s"] = {
            phase: median(each[phase] for each in told)
            for phase in told[0]
            if phase != "commit_ms"
        }
    return found


def _line(record: Record) -> str:
    return ", ".join(
        f"{u.seconds:.3f} s/{u.gap_max_ms:.1f} ms/{u.tokens_share:.0%}"
        for u in update_figures(record)
    )


def show(shape: str, report: dict[str, Any]) -> None:
    """The table of one shape."""
    table = Table(title=f"Qwen3-{shape} shape")
    table.add_column("")
    for name in report:
        table.add_column(name, justify="right")
    for key, (label, style) in ROWS.items():
        cells = [
            style.format(each[key]) if key in each else NO_FIGURE
            for each in report.values()
        ]
        table.add_row(label, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8B"])
    parser.add_argument("--arms", nargs="+", default=[OURS, UPSTREAM])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--updates", type=int, default=10, help="per arm and round")
    parser.add_argument("--steady", type=float, default=0.5, help="seconds around each")
    parser.add_argument("--ranks", default="", help="of the engine, a GPU each")
    parser.add_argument("--engine", default="{}", help="options of both, as JSON")
    parser.add_argument("--inflight", default="{}", help="our options, as JSON")
    parser.add_argument(
        "--backend",
        choices=("inflight_nccl", "inflight_ipc", "inflight_gloo"),
        default="inflight_nccl",
        help="ours; upstream's is nccl. inflight_gloo is for hosts without GPUs",
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ[GIVEN_RANKS] = options.ranks
    gpus = [require_gpus(shape) for shape in options.shapes][-1]
    os.environ["BENCH_ENGINE"] = options.engine
    os.environ["BENCH_INFLIGHT"] = options.inflight
    os.environ["BENCH_BACKEND"] = options.backend
    report: dict[str, Any] = {"machine": facts() | {"gpus": gpus}, "shapes": {}}
    for shape in options.shapes:
        report["shapes"][shape] = arms = {}
        for name, found in measure(shape, options):
            arms[name] = found
            (options.out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        show(shape, arms)

    from benchmarks.chart import draw_gaps

    draw_gaps(report["shapes"], options.out / "gpu.png")
    console.print(f"Written: {options.out}/gpu.json and {options.out}/gpu.png")


if __name__ == "__main__":
    main()
