"""The pictures: tokens coloured by version over time, and the reward."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only, also where there is a display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from examples.demo.learning.exam import Marks
from examples.demo.results.report import Report

INK, FAINT, CONTROL, LIVE = "#1f2933", "#9aa5b1", "#7b8794", "#0b6e99"
PALETTE = ("#0b6e99", "#f2a541", "#3c9d6b", "#d1495b", "#6c5b9e")
"""Versions take turns: neighbours in time must look different."""

STYLE = {
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.dpi": 130,
}
ZOOM_COMMITS = 3
LABELS_AT_MOST = 10
SMOOTH_STEPS = 5


def draw_timeline(report: Report, path: Path) -> None:
    """Every token of every stream: the whole run, and a few commits from near."""
    requests, commits = report.published.finished, report.published.commits
    zero = min(request["started"] for request in requests)
    with plt.rc_context(STYLE):
        figure, (whole, near) = plt.subplots(
            2, 1, figsize=(13, 8.2), height_ratios=(1, 1), layout="constrained"
        )
        _lanes(whole, requests, zero, width=15)
        _lanes(near, requests, zero, width=17)
        whole.set_title(
            f"{report.num_streams} streams, {len(commits)} versions: "
            "colour changes where new weights take over",
            pad=26,
        )
        near.set_title("The same from near: every tick is a token", pad=26)
        whole.set_xlim(0, max(request["ended"] for request in requests) - zero)
        shown = _from_near(commits)
        first, last = (shown[i]["committed_at"] - zero for i in (0, -1))
        room = max(0.1, 0.2 * (last - first))
        near.set_xlim(first - room, last + room)
        every = -(-len(commits) // LABELS_AT_MOST)
        for number, commit in enumerate(commits):
            at = commit["committed_at"] - zero
            _mark(whole, at, commit["version"] if number % every == 0 else "", 0.5)
            _mark(near, at, commit["version"] if commit in shown else "", 1.1)
        near.set_xlabel("seconds since the first request; a line is a commit")
        figure.savefig(path)
        plt.close(figure)


def draw_rewards(report: Report, path: Path) -> None:
    """Reward of the rollouts of both arms, and the three exams."""
    arms = (
        ("nothing published", CONTROL, report.kept),
        ("published in flight", LIVE, report.published),
    )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 5.4), layout="constrained")
        for _, colour, arm in arms:
            rewards = [step["reward"] for step in arm.steps]
            steps = range(1, len(rewards) + 1)
            axes.plot(steps, rewards, color=colour, alpha=0.25, linewidth=1)
            axes.plot(steps, _smooth(rewards), color=colour, linewidth=2.4)
        end = report.num_steps * 1.03 + 0.5
        _exam(axes, 0, report.before, INK, "before")
        _exam(axes, end, report.control, CONTROL, "control:\nnothing published")
        _exam(axes, end, report.after, LIVE, "after:\npublished in flight")
        axes.set_xlim(-end * 0.04, end * 1.28)
        axes.set_ylim(0, 1)
        axes.set_xticks(range(0, report.num_steps + 1, max(1, report.num_steps // 8)))
        axes.set_xlabel("optimiser step")
        axes.set_ylabel("share of answers that are right")
        axes.set_title(
            "Reward: lines are rollouts, points are exams on held-out prompts"
        )
        axes.grid(axis="y", color=FAINT, alpha=0.25)
        figure.savefig(path)
        plt.close(figure)


def _lanes(
    axes: Axes, requests: list[dict[str, Any]], zero: float, width: float
) -> None:
    """A lane per client, a tick per arrival in the colour of its version."""
    num_lanes = max(request["client"] for request in requests) + 1
    half = width / 40
    ticks: dict[str, list[list[tuple[float, float]]]] = {c: [] for c in PALETTE}
    for request in requests:
        lane = num_lanes - request["client"]
        for at, epoch in tokens_of(request):
            x = at - zero
            colour = PALETTE[epoch % len(PALETTE)]
            ticks[colour].append([(x, lane - half), (x, lane + half)])
    for colour, lines in ticks.items():
        axes.add_collection(LineCollection(lines, colors=colour, linewidths=0.9))
    axes.set_ylim(0.4, num_lanes + 0.6)
    axes.set_yticks(range(1, num_lanes + 1), range(num_lanes, 0, -1))
    axes.set_ylabel("stream")
    axes.tick_params(axis="y", length=0)


def tokens_of(request: dict[str, Any]) -> Iterator[tuple[float, int]]:
    """Time and epoch of every arrival of a request: that of its newest token."""
    spans = iter(request["spans"])
    span = next(spans)
    seen = 0
    for at, count in request["arrivals"]:
        seen += count
        while span["end"] < seen:
            span = next(spans)
        yield at, span["epoch"]


def _from_near(commits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few commits in a row that follow each other as fast as most do."""
    runs = [commits[i : i + ZOOM_COMMITS] for i in range(len(commits))]
    runs = [run for run in runs if len(run) == ZOOM_COMMITS] or [commits]
    runs.sort(key=lambda run: run[-1]["committed_at"] - run[0]["committed_at"])
    return runs[len(runs) // 2]


def _mark(axes: Axes, at: float, label: str, width: float) -> None:
    axes.axvline(at, color=INK, linewidth=width, alpha=0.75)
    if label:
        axes.text(
            at,
            1.02,
            label,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=9.5,
        )


def _smooth(values: list[float]) -> list[float]:
    """The mean of each value and those shortly before it."""
    return [
        statistics.fmean(values[max(0, i + 1 - SMOOTH_STEPS) : i + 1])
        for i in range(len(values))
    ]


def _exam(axes: Axes, x: float, marks: Marks, colour: str, label: str) -> None:
    """A point with its 95 % interval and what it is."""
    reward = marks.reward
    below, above = reward.value - reward.low, reward.high - reward.value
    axes.errorbar(
        x,
        reward.value,
        yerr=[[below], [above]],
        fmt="o",
        color=colour,
        markersize=8,
        capsize=5,
        linewidth=2,
        zorder=3,
    )
    beside = 12 if x else 10
    axes.annotate(
        f"{label}\n{reward.value:.0%}",
        (x, reward.value),
        xytext=(beside, 0 if x else 26),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold",
    )
