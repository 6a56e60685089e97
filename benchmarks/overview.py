"""One picture of the kept results on GPUs: gap, seconds, throughput and memory.

`python -m benchmarks.overview` draws `benchmarks/results/overview.png` from the figures
in that folder. Upstream has a bar where it was measured in the same run as ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.chart import COLOURS
from benchmarks.record import OURS, UPSTREAM

RESULTS = Path(__file__).parent / "results"
WIDTH = 0.38


@dataclass(frozen=True)
class Run:
    """One model over one transport, and the file of its figures."""

    label: str
    gigabytes: float
    """Of one set of weights."""
    file: str
    ours: tuple[str, ...]
    """Keys that lead to the figures."""
    upstream: tuple[str, ...] = ()

    def figures(self) -> dict[str, Any]:
        """The figures of a run by arm."""
        told = json.loads((RESULTS / self.file).read_text())
        found = {}
        for name, keys in ((OURS, self.ours), (UPSTREAM, self.upstream)):
            at = told
            for key in keys:
                at = at[key]
            if keys:
                found[name] = at
        return found


def _shape(name: str) -> dict[str, tuple[str, ...]]:
    return {arm: ("shapes", name, arm) for arm in (OURS, UPSTREAM)}


RUNS = (
    Run("0.6B\nNCCL*", 1.2, "gpu-h200.json", **_shape("0.6B")),
    Run("8B\nNCCL", 16.4, "gpu-h200-nccl.json", **_shape("8B")),
    Run("8B\nCUDA IPC", 16.4, "gpu-h200-parts.json", ("rounds", "all again")),
    Run(
        "8B\nfiles",
        16.4,
        "gpu-h200-disk.json",
        ("arms", OURS),
        ("arms", UPSTREAM),
    ),
    Run(
        "9,411 tensors\nCUDA IPC",
        31.0,
        "gpu-h200-parts-experts.json",
        ("rounds", "all"),
    ),
    Run("32B\nNCCL", 65.5, "gpu-h200-nccl.json", **_shape("32B")),
    Run("32B, two GPUs\nNCCL", 65.5, "gpu-h200-x4.json", ("shapes", "32B", OURS)),
)
"""The asterisk: upstream's arm moved no bytes there; see docs/performance.md."""

PANELS: tuple[tuple[str, bool, Callable[[str, Run, Any], float]], ...] = (
    (
        "largest gap at an update, median, ms",
        True,
        lambda _, run, told: float(told["gap_update_median_ms"]),
    ),
    (
        "from call to return, s",
        True,
        lambda _, run, told: float(told["update_s"]),
    ),
    (
        "tokens/s meanwhile, % of decoding alone",
        False,
        lambda _, run, told: 100 * float(told["tokens_share"]),
    ),
    (
        "weights on the GPUs, GB",
        True,
        lambda arm, run, _: run.gigabytes * (2 if arm == OURS else 1),
    ),
)
"""Title, whether the axis is logarithmic, and what a bar shows."""


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def main() -> None:
    found = [run.figures() for run in RUNS]
    figure, panels = plt.subplots(2, 2, figsize=(13, 8))
    for panel, (title, is_log, value) in zip(panels.flat, PANELS, strict=True):
        for offset, arm in ((-WIDTH / 2, OURS), (WIDTH / 2, UPSTREAM)):
            bars = [
                (place + offset, value(arm, run, told[arm]))
                for place, (run, told) in enumerate(zip(RUNS, found, strict=True))
                if arm in told
            ]
            places, heights = zip(*bars, strict=True)
            drawn = panel.bar(places, heights, WIDTH, color=COLOURS[arm], label=arm)
            panel.bar_label(drawn, [_number(height) for height in heights], fontsize=8)
        if is_log:
            panel.set_yscale("log")
        panel.margins(y=0.15)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xticks(range(len(RUNS)), [run.label for run in RUNS], fontsize=8)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    for place, told in enumerate(found):
        steady = told[OURS]["gap_steady_max_ms"]
        panels.flat[0].plot(
            [place - WIDTH, place], [steady, steady], color="black", linewidth=1.5
        )
    panels.flat[0].plot([], [], color="black", label="largest without an update")
    panels.flat[0].legend(fontsize=8)
    figure.suptitle(
        "Weights replaced on H200 while 64 streams decode (32B on one GPU: 32)",
        fontsize=12,
    )
    figure.tight_layout()
    figure.savefig(RESULTS / "overview.png", dpi=110)


if __name__ == "__main__":
    main()
