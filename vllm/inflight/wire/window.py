"""The window: how many buckets are under way at once.

One more while the wire is waited for, one fewer while it waits: a broadcast that is
begun early takes processors of the GPU from decoding until its bytes have come.
"""

from __future__ import annotations

LEAST = 2
"""One is looked at while the next one comes."""


class Window:
    """Between `LEAST` and `most` buckets; starts at `most`.

    Args:
        most: buckets there is memory for.
        target_s: longest wait for a bucket that is no reason for one more.

    """

    def __init__(self, most: int, target_s: float) -> None:
        self.most = most
        self.target_s = target_s
        self.size = most
        self.waited_s = 0.0
        """For the last bucket."""
        self.total_s = 0.0
        """For all buckets of this update."""

    def note(self, waited_s: float) -> None:
        """A bucket was waited for, or (0) was there already."""
        self.waited_s = waited_s
        self.total_s += waited_s
        if waited_s > self.target_s:
            self.size = min(self.size + 1, self.most)
        elif waited_s == 0.0:
            self.size = max(self.size - 1, min(LEAST, self.most))
