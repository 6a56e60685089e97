"""How sure one can be of a share that was counted."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

Z = 1.959964
"""Standard deviations that hold 95 % of a normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its 95 % interval."""

    value: float
    low: float
    high: float

    def is_below(self, other: Interval) -> bool:
        """Whether the two do not overlap, and this one is the lower."""
        return self.high < other.low

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson(hits: float, count: int) -> Interval:
    """Wilson's interval of `hits` in `count` independent trials."""
    share = hits / count
    shrink = 1 + Z**2 / count
    centre = (share + Z**2 / (2 * count)) / shrink
    half = Z / shrink * sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
