"""The picture of the CPU benchmark: every gap around every update, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.figures import gaps
from benchmarks.record import OURS, UPSTREAM, Record

BEFORE_S, PAST_S = 2.0, 2.0
TICKS = [5, 10, 20, 50, 100, 200, 500]
COLOURS = {OURS: "#1b7f5c", UPSTREAM: "#c2452d"}
TITLES = {
    OURS: "vLLM in-flight: staged while decoding, switched between two steps",
    UPSTREAM: "upstream vLLM: pause, update, resume",
}


def draw(arms: dict[str, list[Record]], table: dict[str, Any], file: Path) -> None:
    """One row per arm: gaps of all updates over each other, begin at 0."""
    longest = max(
        u.end - u.start for rs in arms.values() for r in rs for u in r.updates
    )
    figure, rows = plt.subplots(
        len(arms), 1, figsize=(10, 6.4), sharex=True, sharey=True, squeeze=False
    )
    for (name, records), row in zip(arms.items(), rows[:, 0], strict=True):
        _row(row, name, records, table[name])
    rows[-1, 0].set_xlim(-BEFORE_S, longest + PAST_S)
    rows[-1, 0].set_xlabel("seconds since the update was asked for")
    figure.suptitle(
        "How long a reader of a stream waits for the next token, "
        "while the weights are replaced",
        fontsize=13,
    )
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    plt.close(figure)


def draw_gaps(shapes: dict[str, dict[str, Any]], file: Path) -> None:
    """One panel per shape: the largest gap at every update, beside steady decoding."""
    figure, panels = plt.subplots(
        1, len(shapes), figsize=(5 * len(shapes), 4.2), sharey=True, squeeze=False
    )
    for (shape, report), panel in zip(shapes.items(), panels[0], strict=True):
        for name, found in report.items():
            worst = [update["gap_max_ms"] for update in found["updates"]]
            numbers = range(1, len(worst) + 1)
            label = f"{name}: median {found['gap_update_median_ms']:.1f} ms"
            panel.plot(numbers, worst, "o", color=COLOURS[name], label=label)
            panel.axhline(found["gap_steady_max_ms"], color=COLOURS[name], ls="--")
        panel.set_title(f"Qwen3-{shape} shape", loc="left")
        panel.set_xlabel("update")
        panel.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        panel.set_yscale("log")
        panel.set_yticks(TICKS, [str(tick) for tick in TICKS])
        panel.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        panel.grid(axis="y", alpha=0.3)
        panel.legend(fontsize=8, loc="center right")
    panels[0, 0].set_ylabel("largest gap between two tokens, ms")
    figure.suptitle(
        "Largest gap at each update\ndashed: the largest without one",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _row(row: Any, name: str, records: list[Record], figures: dict[str, Any]) -> None:
    for record in records:
        for update in record.updates:
            row.axvspan(0, update.end - update.start, color=COLOURS[name], alpha=0.05)
            near = [
                (end - update.start, 1e3 * (end - start))
                for start, end in gaps(record)
                if -BEFORE_S < end - update.start < update.end - update.start + PAST_S
            ]
            row.scatter(
                *zip(*near, strict=True), s=5, color=COLOURS[name], linewidths=0
            )
    row.axhline(
        figures["gap_steady_p50_ms"],
        color="0.5",
        linewidth=1,
        linestyle="--",
        label=f"median of decoding alone, {figures['gap_steady_p50_ms']:.0f} ms",
    )
    row.set_yscale("log")
    row.set_yticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
    row.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    row.set_ylabel("gap between two tokens, ms")
    row.set_title(
        f"{TITLES[name]}\nlargest gap at an update: median "
        f"{figures['gap_update_median_ms']:.0f} ms, worst "
        f"{figures['gap_update_max_ms']:.0f} ms; the update takes "
        f"{figures['update_s']:.2f} s (shaded) and costs {figures['lost_s']:.2f} s "
        "of decoding",
        fontsize=10,
        loc="left",
    )
    row.grid(axis="y", alpha=0.3)
    row.legend(loc="upper right", fontsize=8)
