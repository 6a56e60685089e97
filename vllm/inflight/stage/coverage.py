"""Coverage: which elements of a parameter have been written by its loaders.

A fused parameter is filled by several tensors, a sharded one by a part of one;
what counts is that in the end every element was written, whatever the tensors
were called.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides within a storage."""


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


class Writes(TorchDispatchMode):
    """Records the views of one tensor that in-place writes go to."""

    def __init__(self, param: torch.Tensor) -> None:
        super().__init__()
        self._storage = param.untyped_storage()._cdata
        self.views: dict[View, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _WRITES:
            target = args[0]
            if target.untyped_storage()._cdata == self._storage and target.numel():
                view = (
                    target.storage_offset(),
                    tuple(target.shape),
                    tuple(target.stride()),
                )
                self.views[view] = target.numel()
        return func(*args, **(kwargs or {}))


_WRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}
