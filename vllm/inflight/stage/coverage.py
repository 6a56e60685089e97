"""Coverage: which elements of a parameter have been written by its loaders.

A fused parameter is filled by several tensors, a sharded one by a part of one;
what counts is that in the end every element was written, whatever the tensors
were called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vllm.inflight.stage.plan import View


@dataclass(slots=True)
class Fill:
    """Which views of one parameter have been written."""

    numel: int
    views: dict[View, int] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Elements that nothing was written to."""
        if sum(self.views.values()) == self.numel:
            return 0
        # Views that overlap (a loader that writes twice) cannot just be added up.
        written = torch.zeros(self.numel, dtype=torch.bool)
        for offset, shape, stride in self.views:
            written.as_strided(shape, stride, offset).fill_(True)
        return self.numel - int(written.sum())


def tally(fills: Mapping[str, Fill]) -> dict[str, int]:
    """How many parameters there are, are begun, and have had as much as they need.

    Cheap enough for every chunk: what a loader wrote twice is counted twice, and only
    the verdict looks closer.
    """
    written = [(fill.numel, sum(fill.views.values())) for fill in fills.values()]
    return {
        "total": len(written),
        "begun": sum(count > 0 for _, count in written),
        "complete": sum(count >= numel for numel, count in written),
    }
