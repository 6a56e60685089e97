"""Gaps between tokens, told apart by what the engine was doing meanwhile.

        publish begins            committed
    ────────┬───────────────────────┬─────────────────────────►  time
    steady  │       staging         │
            │                 ├── commit ──┤     steady
                              MARGIN   MARGIN

A gap is the time between two arrivals in one stream. It belongs to the commit if
any part of it lies within MARGIN of one, else to staging if any part of it lies in
one, else it is steady. So a gap can only be counted against a commit, not for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

MARGIN_S = 0.1
"""Covers the way of a token from the engine to a client on a busy host."""

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """How long gaps of one kind were, in milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        """Of any number of gaps; all 0 if there are none."""
        ordered = sorted(1e3 * gap for gap in seconds)
        if not ordered:
            return cls(0, 0.0, 0.0, 0.0)

        def quantile(share: float) -> float:
            return round(ordered[ceil(share * len(ordered)) - 1], 2)

        return cls(len(ordered), quantile(0.5), quantile(0.99), quantile(1.0))


class Windows:
    """Windows of time that may overlap, and whether a gap touches one."""

    def __init__(self, windows: Iterable[Window]) -> None:
        merged: list[Window] = []
        for start, end in sorted(windows):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]

    def touch(self, start: float, end: float) -> bool:
        """Whether any part of `start` to `end` lies in a window."""
        first = bisect_left(self._ends, start)
        return first < len(self._starts) and self._starts[first] <= end


def gaps_of(arrivals: Sequence[Sequence[float]]) -> list[Window]:
    """The gaps of one stream, from its arrivals (time, number of tokens)."""
    times = [time for time, _ in arrivals]
    return list(pairwise(times))


def sort_gaps(
    requests: Iterable[dict[str, Any]], commits: Iterable[dict[str, Any]]
) -> dict[str, Spread]:
    """The spread of `commit`, `staging` and `steady` gaps of all streams."""
    commits = list(commits)
    at_commit = Windows(
        (c["committed_at"] - MARGIN_S, c["committed_at"] + MARGIN_S) for c in commits
    )
    staging = Windows((c["began"], c["committed_at"]) for c in commits)
    kinds: dict[str, list[float]] = {"commit": [], "staging": [], "steady": []}
    for request in requests:
        for start, end in gaps_of(request["arrivals"]):
            if at_commit.touch(start, end):
                kind = "commit"
            else:
                kind = "staging" if staging.touch(start, end) else "steady"
            kinds[kind].append(end - start)
    return {kind: Spread.of(seconds) for kind, seconds in kinds.items()}
