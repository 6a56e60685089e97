"""A fill: which elements of one parameter have been written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

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
        views = [view for view, count in self.views.items() if count]
        is_enough = sum(self.views.values()) == self.numel
        if is_enough and (_apart(_spans(views)) or _apart(_columns(views))):
            return 0
        # Views that overlap (a loader that writes twice) cannot just be added up. On
        # the host, since a GPU that serves has no memory to spare.
        written = torch.zeros(self.numel, dtype=torch.bool, device="cpu")
        for offset, shape, stride in views:
            written.as_strided(shape, stride, offset).fill_(True)
        return self.numel - int(written.sum())


def _apart(ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether none of (first, end) reaches into another one."""
    return all(end <= first for (_, end), (first, _) in pairwise(sorted(ranges)))


def _spans(views: list[View]) -> list[tuple[int, int]]:
    """From the first element of each view to its last, whatever it leaves out."""
    lasts = (
        sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        for _, shape, stride in views
    )
    return [
        (view[0], view[0] + last + 1) for view, last in zip(views, lasts, strict=True)
    ]


def _columns(views: list[View]) -> list[tuple[int, int]]:
    """The columns of views of the same rows; of others, ranges that are not apart."""
    if all(len(step) == 2 and step[0] and step[1] == 1 for _, _, step in views):
        rows = {(at // step[0], shape[0], step[0]) for at, shape, step in views}
        if len(rows) == 1:
            return [
                (at % step[0], at % step[0] + shape[1]) for at, shape, step in views
            ]
    return [(0, 1), (0, 1)]
