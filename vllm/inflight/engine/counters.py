"""Counters of one engine core since its start, for `/metrics`."""

from __future__ import annotations

import bisect
import time
from collections import Counter
from typing import Any

from vllm.inflight.engine.transaction import Update
from vllm.inflight.update import PauseMode

GAP_EDGES_MS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Counters:
    """The counters of one engine core; changed between two steps only."""

    def __init__(self) -> None:
        self.gaps = [0] * (len(GAP_EDGES_MS) + 1)
        """Number of flips by their gap: up to each edge, and beyond the last edge."""
        self.gap_ms = 0.0
        self.staging_s = 0.0
        self.staged_bytes = 0
        self.num_rollbacks = 0
        self.requests: Counter[str] = Counter()
        """Requests that pauses and commits have retracted or aborted."""
        self.pause_s: dict[str, float] = {}
        """Seconds of ended pauses, by their last mode."""
        self.num_absorbed = 0
        """Pauses that were absorbed."""
        self.enforced: Counter[str] = Counter()
        """Absorbed pauses that took force, by what needed them."""
        self.outside_writes: Counter[str] = Counter()
        """Out-of-band writes, by the call that has made them."""
        self._paused: tuple[PauseMode, float] | None = None

    def switched(self, facts: dict[str, Any]) -> None:
        """Count one flip, from the fields of its reply."""
        self.gaps[bisect.bisect_left(GAP_EDGES_MS, facts["gap_ms"])] += 1
        self.gap_ms += facts["gap_ms"]

    def treated(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Count retracted and aborted requests; returns `facts`."""
        self.requests["retracted"] += facts.get("num_retracted", 0)
        self.requests["aborted"] += facts.get("num_aborted", 0)
        return facts

    def committed(self, update: Update) -> None:
        """Count the seconds and the bytes of a staged version."""
        self.staging_s += update.seconds()["staging"]
        self.staged_bytes += update.num_bytes

    def paused(self, mode: PauseMode) -> None:
        """Note that a pause begins or changes its mode."""
        began = time.monotonic() if self._paused is None else self._paused[1]
        self._paused = (mode, began)

    def resumed(self) -> float:
        """End the pause, if there is one; returns its seconds."""
        if self._paused is None:
            return 0.0
        mode, began = self._paused
        seconds = time.monotonic() - began
        self.pause_s[mode.value] = self.pause_s.get(mode.value, 0.0) + seconds
        self._paused = None
        return seconds

    def to_dict(self) -> dict[str, Any]:
        """The counters, as the front end gets them."""
        return {
            "gaps": self.gaps,
            "gap_ms": self.gap_ms,
            "staging_s": self.staging_s,
            "staged_bytes": self.staged_bytes,
            "rollbacks": self.num_rollbacks,
            "requests": dict(self.requests),
            "pause_s": dict(self.pause_s),
            "pauses_absorbed": self.num_absorbed,
            "pauses_enforced": dict(self.enforced),
            "outside_writes": dict(self.outside_writes),
        }
