"""Elements in which live and shadow weights differ, and nothing else of a parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight import ops


class Stretch(NamedTuple):
    """Elements of one parameter in a log: the entries from `first` to `end`."""

    param: str
    first: int
    end: int
    width: int
    """Bytes of an element."""


@dataclass(frozen=True, slots=True)
class ChangedElements:
    """A log of elements that one part of a delta has changed.

    Attributes:
        offsets: of the elements in the memory of their parameters, int32; -1 for an
            entry that is served on another rank.
        stretches: the parameter of each entry.

    """

    offsets: torch.Tensor
    stretches: tuple[Stretch, ...]

    @property
    def params(self) -> set[str]:
        """The parameters that hold these elements."""
        return {stretch.param for stretch in self.stretches}

    def without(self, params: Collection[str]) -> ChangedElements:
        """The log without the elements of these parameters."""
        if not params:  # as usual after a chain of deltas
            return self
        kept = tuple(s for s in self.stretches if s.param not in params)
        return replace(self, stretches=kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of these elements, in all ranks' parts."""
        return sum((end - first) * width for _, first, end, width in self.stretches)

    def copy(
        self, live: Mapping[str, torch.Tensor], shadow: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy the elements from live to shadow parameters, one by one with torch."""
        for param, first, end, width in self.stretches:
            dtype = ops.INTEGERS[width]
            offsets = self.offsets[first:end]
            offsets = offsets[offsets >= 0].to(torch.int64)
            source = elements(live[param], dtype)[offsets]
            elements(shadow[param], dtype)[offsets] = source


def addresses(
    params: Mapping[str, torch.Tensor], names: Iterable[str]
) -> NDArray[np.int64]:
    """Where the parameters of these names lie."""
    # A parameter of upstream's takes every call of torch through Python, which is ten
    # times as long. And a call through `map` takes no step of Python.
    with torch._C.DisableTorchFunctionSubclass():
        at = map(torch.Tensor.data_ptr, map(params.__getitem__, names))
        return np.fromiter(at, dtype=np.int64)


def elements(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a parameter, element by element, with this dtype of its width."""
    flat = param.data.as_strided((reach(param),), (1,), param.storage_offset())
    return flat.view(dtype)


def reach(param: torch.Tensor) -> int:
    """Elements from the first to the last of a parameter, with gaps."""
    if param.is_contiguous():
        return param.numel()
    steps = zip(param.shape, param.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps) if param.numel() else 0
