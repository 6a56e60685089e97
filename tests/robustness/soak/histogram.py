"""A histogram of fixed size: percentiles of a long run, and no memory that grows."""

import math

BASE = 1.05
LEAST_MS = 0.01
NUM_BUCKETS = 400


class Histogram:
    """Milliseconds, in buckets 5 % wide."""

    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS
        self.count, self.largest = 0, 0.0

    def add(self, value_ms: float) -> None:
        """Count one value."""
        place = math.log(max(value_ms, LEAST_MS) / LEAST_MS, BASE)
        self._counts[min(int(place), NUM_BUCKETS - 1)] += 1
        self.count += 1
        self.largest = max(self.largest, value_ms)

    def percentile(self, share: float) -> float:
        """The upper edge of the bucket in which that share of all values ends."""
        below = 0
        for place, count in enumerate(self._counts):
            below += count
            if count and below >= share * self.count:
                return min(LEAST_MS * BASE ** (place + 1), self.largest)
        return 0.0

    def to_dict(self) -> dict[str, float]:
        """Count, percentiles and the largest, in milliseconds."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}
        told = {name: round(self.percentile(s), 2) for name, s in shares.items()}
        return {"count": self.count, **told, "largest": round(self.largest, 2)}
