"""A fill: which elements of one parameter have been written."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm.inflight.stage.plan import View, are_apart


@dataclass(slots=True)
class Fill:
    """Which views of one parameter have been written."""

    numel: int
    views: dict[View, int] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Elements that nothing was written to."""
        views = [view for view, count in self.views.items() if count]
        if sum(self.views.values()) == self.numel and are_apart(views):
            return 0
        # Views that overlap (a loader that writes twice) cannot just be added up. On
        # the host, since a GPU that serves has no memory to spare.
        written = torch.zeros(self.numel, dtype=torch.bool, device="cpu")
        for offset, shape, stride in views:
            written.as_strided(shape, stride, offset).fill_(True)
        return self.numel - int(written.sum())
