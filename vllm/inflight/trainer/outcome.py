"""What became of a publish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One version published, or skipped."""

    version: str | None
    """The label it is served under; None if it was skipped and had none."""
    step: int | None = None
    skipped: bool = False
    """Whether it gave way, to a busy engine or to a newer publish."""
    update_id: str | None = None
    epochs: Mapping[str, int] = field(default_factory=dict)
    """By engine: the epoch in which it serves this version."""
    digest: str | None = None
    num_bytes: int = 0
    gap_ms: float | None = None
    """Longest time an engine spent on the switch between two steps."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """`snapshot`, `transfer`, `commit`, and `total` since publish was called."""

    @property
    def epoch(self) -> int | None:
        """The epoch of the first engine."""
        return next(iter(self.epochs.values()), None)
