"""The report: the measurements, the goals, and the files."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from examples.demo.arm import Arm
from examples.demo.learning.exam import NUM_PROMPTS, Marks
from examples.demo.results.gaps import MARGIN_S, Spread, sort_gaps

MIN_VERSIONS = 30
"""A run of fewer steps is a rehearsal: what it has learned is not judged."""


@dataclass(frozen=True)
class Report:
    """All measurements of a run."""

    seed: int
    num_steps: int
    num_streams: int
    before: Marks
    control: Marks
    after: Marks
    kept: Arm
    published: Arm
    seconds: dict[str, float]
    """How long each phase took, and `total`."""

    @property
    def gaps(self) -> dict[str, Spread]:
        """Gaps of the published arm by kind, and those of the control."""
        spreads = sort_gaps(self.published.finished, self.published.commits)
        return spreads | {"control": sort_gaps(self.kept.finished, [])["steady"]}

    @property
    def tokens_per_version(self) -> dict[str, int]:
        """Streamed tokens by the version that sampled them, oldest first."""
        counts: Counter[tuple[int, str]] = Counter()
        for request in self.published.finished:
            for span in request["spans"]:
                counts[span["epoch"], span["version"]] += span["end"] - span["start"]
        return {version: counts[epoch, version] for epoch, version in sorted(counts)}

    @property
    def deltas(self) -> list[int]:
        """Bytes of each version that was sent as a delta."""
        return [c["num_bytes"] for c in self.published.commits if c["is_delta"]]

    @property
    def whole_bytes(self) -> int:
        """Bytes of the last version that was sent whole, in the served dtype."""
        whole = [c["num_bytes"] for c in self.published.commits if not c["is_delta"]]
        return whole[-1]

    @property
    def spanning_share(self) -> float:
        """Share of streamed requests that have tokens of two versions or more."""
        return fmean(len(request["spans"]) > 1 for request in self.published.finished)

    def goals(self) -> dict[str, bool]:
        """The goals of the demo, and whether each is met."""
        requests = [*self.kept.requests, *self.published.requests]
        goals = {
            f"{self.num_steps} versions committed in flight": (
                len(self.published.commits) == self.num_steps
            ),
            "no request failed": all(r["error"] is None for r in requests),
            "requests span versions": self.spanning_share > 0,
            "the exam after was answered by the last version alone": (
                self.after.epochs == [self.published.commits[-1]["epoch"]]
            ),
        }
        if self.num_steps < MIN_VERSIONS:
            return goals
        return goals | {
            "reward is higher than before, beyond doubt": (
                self.before.reward.is_below(self.after.reward)
            ),
            "reward is higher than the control's, beyond doubt": (
                self.control.reward.is_below(self.after.reward)
            ),
        }

    def facts(self) -> dict[str, Any]:
        """The content of demo.json."""
        rewards = {
            "reward_before": self.before.reward,
            "reward_after": self.after.reward,
            "reward_control": self.control.reward,
        }
        facts: dict[str, Any] = {}
        for name, interval in rewards.items():
            facts[name] = round(interval.value, 4)
            facts[f"{name}_low"] = round(interval.low, 4)
            facts[f"{name}_high"] = round(interval.high, 4)
        gaps = self.gaps
        steps = self.published.steps
        return facts | {
            "reward_prompts": NUM_PROMPTS,
            "versions_committed": len(self.published.commits),
            "requests_finished": len(self.published.finished),
            "requests_failed": len(self.kept.failed) + len(self.published.failed),
            "errors": [r["error"] for r in self.kept.failed + self.published.failed],
            "spanning_share": round(self.spanning_share, 4),
            "rollouts_spanning_share": round(fmean(s["spanning"] for s in steps), 4),
            "token_age_mean": round(fmean(s["age"] for s in steps), 3),
            "gap_commit_max_ms": gaps["commit"].max_ms,
            "gap_steady_max_ms": gaps["steady"].max_ms,
            "gap_control_max_ms": gaps["control"].max_ms,
            "gaps": {kind: asdict(spread) for kind, spread in gaps.items()},
            "gap_margin_ms": 1e3 * MARGIN_S,
            "switch_max_ms": max(c["gap_ms"] for c in self.published.commits),
            "deltas_committed": len(self.deltas),
            "delta_bytes_mean": round(fmean(self.deltas)) if self.deltas else None,
            "updates": [
                {name: commit[name] for name in ("version", "is_delta", "num_bytes")}
                for commit in self.published.commits
            ],
            "publish_mean_s": round(
                fmean(c["seconds"]["total"] for c in self.published.commits), 4
            ),
            "seconds": round(self.seconds["total"], 1),
            "seconds_by_phase": {k: round(v, 1) for k, v in self.seconds.items()},
            "seed": self.seed,
            "steps": self.num_steps,
            "streams": self.num_streams,
            "goals": self.goals(),
            "tokens_per_version": self.tokens_per_version,
            "control_rewards": [round(s["reward"], 4) for s in self.kept.steps],
            "rollout_rewards": [round(s["reward"], 4) for s in steps],
        }

    def rows(self) -> list[tuple[str, str]]:
        """The facts as rows of a table."""
        facts, gaps = self.facts(), self.gaps
        tokens = facts["tokens_per_version"].values()
        return [
            ("reward on held-out prompts, before", str(self.before.reward)),
            ("the same, trained but nothing published", str(self.control.reward)),
            ("the same, after training in flight", str(self.after.reward)),
            ("versions committed while streams ran", str(facts["versions_committed"])),
            (
                "of these sent as deltas, mean size and that of a whole version",
                f"{len(self.deltas)}, {_mb(fmean(self.deltas or [0]))} of "
                f"{_mb(self.whole_bytes)}",
            ),
            (
                "streamed requests finished / failed",
                f"{facts['requests_finished']} / {facts['requests_failed']}",
            ),
            ("of these with tokens of several versions", f"{self.spanning_share:.0%}"),
            (
                "streamed tokens per version, least to most",
                f"{min(tokens)} to {max(tokens)}",
            ),
            ("longest gap at a commit", _gap(gaps["commit"])),
            ("longest gap while a version is staged", _gap(gaps["staging"])),
            ("longest gap otherwise", _gap(gaps["steady"])),
            ("longest gap in the control, no updates", _gap(gaps["control"])),
            (
                "switch of the weights itself, longest",
                f"{facts['switch_max_ms']:.2f} ms",
            ),
            ("publishing a version, mean", f"{1e3 * facts['publish_mean_s']:.0f} ms"),
            ("seconds in all", f"{facts['seconds']:.0f}"),
        ]

    def table(self) -> Table:
        """The rows, and under them the goals."""
        table = Table(title="An online run with weights replaced in flight")
        table.add_column("measured")
        table.add_column("value", justify="right")
        for name, value in self.rows():
            table.add_row(name, value)
        table.add_section()
        for goal, is_met in self.goals().items():
            table.add_row(goal, "[green]yes" if is_met else "[red]NO")
        return table

    def write(self, out: Path) -> None:
        """demo.json; the pictures and the page are drawn from the same facts."""
        text = json.dumps(self.facts(), indent=2)
        (out / "demo.json").write_text(text + "\n")


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.2f} MB"


def _gap(spread: Spread) -> str:
    return f"{spread.max_ms:.0f} ms (99 of 100 below {spread.p99_ms:.0f})"
