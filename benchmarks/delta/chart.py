"""Pictures of deltas: bytes and time, over the share of elements that has changed.

The benchmarks draw them beside their results. `python -m benchmarks.delta.chart FILE`
draws that of a kept file, under its name with `.png`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from vllm.inflight.trainer.deltas.batches import WHOLE_FROM

CODED = {"encode_s": "search and coding", "decode_s": "decoding", "apply_s": "applying"}
"""Seconds of a row of the sweep → what took them."""
COLOURS = {
    "device": "#1b7f5c",
    "delta": "#3a5fa8",
    "upstream": "#c2452d",
    "upstream, sparse": "#b07d1a",
}
"""Of the arms."""


def draw_sweep(rows: Sequence[Mapping[str, float]], file: Path) -> None:
    """Size and speed of the codec, from the sweep of `python -m benchmarks.delta`."""
    figure, (sizes, times) = plt.subplots(1, 2, figsize=(10, 4))
    shares = [100 * row["share"] for row in rows]
    size = [100 * row["share_of_whole"] for row in rows]
    sizes.plot(shares, size, "o-", color=COLOURS["device"], label="delta")
    sizes.axhline(100, color="0.5", ls="--", label="whole version")
    label = "from here on, auto sends the version whole"
    sizes.axhline(100 * WHOLE_FROM, color=COLOURS["upstream"], ls=":", label=label)
    sizes.set_ylabel("bytes, % of the whole version")
    for key, what in CODED.items():
        times.plot(shares, [1e3 * row[key] for row in rows], "o-", label=what)
    read = [1e3 * row["read_s"] for row in rows]
    times.plot(shares, read, color="0.5", ls="--", label="reading both versions")
    times.set_ylabel("ms")
    for panel in (sizes, times):
        panel.set_yscale("log")
    _finish(figure, (sizes, times), file)


def draw_updates(arms: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Bytes, time and lost decoding of updates: `python -m benchmarks.gpu.delta`.

    Args:
        arms: name → title of a round, which is the share, or begins with `whole` →
            figures.
        file: of the picture.

    """
    figure, panels = plt.subplots(1, 3, figsize=(14, 4))
    for panel, label, of in zip(
        panels,
        ("MB sent", "start to commit, ms", "decoding lost, ms"),
        (_megabytes, _milliseconds, _lost),
        strict=True,
    ):
        for name, rounds in arms.items():
            _arm(panel, name, rounds, of)
        panel.set_ylabel(label)
        panel.set_yscale("log")
    _finish(figure, panels, file)


def _megabytes(figures: Mapping[str, float]) -> float:
    return figures["told_bytes"] / 1e6


def _milliseconds(figures: Mapping[str, float]) -> float:
    """Of the engine; upstream's does not tell, so its caller's."""
    return 1e3 * figures.get("told_total", figures["update_s"])


def _lost(figures: Mapping[str, float]) -> float:
    return 1e3 * figures["lost_s"]


def _arm(
    panel: Any,
    name: str,
    rounds: Mapping[str, Any],
    of: Callable[[Mapping[str, float]], float],
) -> None:
    """Add one arm to a panel, if it has such a figure."""
    points, wholes = [], []
    for title, figures in rounds.items():
        if title == "rollbacks" or title.startswith(("auto", "every")):
            continue
        with suppress(KeyError):  # older files do not have all figures
            if title.startswith("whole"):
                wholes.append(of(figures))
            else:
                points.append((100 * float(title), of(figures)))
    colour = COLOURS[name]
    if points:
        panel.plot(*zip(*points, strict=True), "o-", color=colour, label=name)
    for number, value in enumerate(wholes):
        label = None if number else f"{name}, whole version"
        panel.axhline(value, color=colour, ls="--", lw=1, label=label)


def _finish(figure: Any, panels: Sequence[Any], file: Path) -> None:
    for panel in panels:
        panel.set_xscale("log")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
        if panel.get_yscale() == "log":
            panel.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        panel.set_xlabel("% of the elements changed")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw(report: Mapping[str, Any], file: Path) -> None:
    """The picture of a report of either benchmark."""
    if "sweep" in report:
        draw_sweep(report["sweep"], file)
        return
    # Older reports have the rounds of their only arm.
    draw_updates(report.get("arms") or {"device": report["rounds"]}, file)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        kept = Path(word)
        draw(json.loads(kept.read_text()), kept.with_suffix(".png"))
