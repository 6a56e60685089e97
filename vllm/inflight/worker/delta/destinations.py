"""Where the elements of a checkpoint tensor are served on this rank.

The replay plan (replay_plan.py) says which part of a tensor its loader copies into
which view of which parameter. Here single elements are followed along these copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple, Self

import numpy as np
import torch

from vllm.inflight.worker.model_state import ModelState, recall
from vllm.inflight.worker.replay_plan import Copied, Entry, View, are_apart, span

MOST_DIMS = 4
"""Most dimensions of a part, as kernels follow them; see `dims_of`."""

WORD = 8
"""Bytes that kernels read at once, where an element is shorter."""

NEVER = 1 << 62
"""A step that no place reaches: the stride of a dimension that is not there."""


class Found(NamedTuple):
    """The elements of a tensor that lie in one parameter.

    `chosen` picks them from the elements that were asked for; None means all of them.
    `offsets` are their places in the parameter, counted in elements of its memory.
    """

    param: str
    chosen: torch.Tensor | None
    offsets: torch.Tensor


class Destinations:
    """The places of one checkpoint tensor in the parameters of a rank.

    They are worked out once for each entry, as that takes long for many tensors.

    Attributes:
        entry: what the loader does with the tensor.
        copies: the copies that its loader makes.
        params: the parameters that hold an element of the tensor.
        is_once: whether no element of the tensor is served twice on this rank.
        has_all: whether every element of the tensor is served on this rank, and once.
        form: shape and dtype of the tensor.
        steps: int64 [copies, 2 + 3 * MOST_DIMS]: where each part and its view begin;
            then size, stride and stride in the parameter of each dimension. Dimensions
            that lie in one piece on both sides are one.
        are_flat: bool [copies]: whether a part and its view are contiguous.
        runs: int64 [copies]: a part and its view consist of runs of so many elements.
            Both begin them at multiples of that, counted from their own beginning.

    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.copies = entry.copies
        self._numel = entry.shape.numel()
        self.params = frozenset(copied.param for copied in self.copies)
        parts = [copied.part for copied in self.copies]
        self._num_served = sum(prod(shape) for _, shape, _ in parts)
        self.is_once = are_apart(parts)
        self.has_all = self._num_served == self._numel and self.is_once
        self.form = tuple(entry.shape), str(entry.dtype).removeprefix("torch.")
        steps = [steps_of(copied.part, copied.view) for copied in entry.copies]
        self.steps = np.array(steps, dtype=np.int64).reshape(-1, 2 + 3 * MOST_DIMS)
        self.are_flat = np.array(list(map(_is_flat, entry.copies)), dtype=bool)
        self.runs = np.array([*map(run_of, self.steps.tolist())], dtype=np.int64)

    @classmethod
    def of(cls, entry: Entry | None) -> Destinations | None:
        """The places of a tensor with this entry; None if they are not all known.

        They are known if the loader only copies, keeps every bit, and the replay check
        has passed.
        """
        if entry is None or not entry.is_proved or not entry.copies:
            return None
        has_all = entry.is_whole and entry.is_traced
        if not has_all or not all(map(_is_plain, entry.copies)):
            return None
        return cls(entry)

    @classmethod
    def nowhere(cls, shape: Sequence[int], dtype: torch.dtype) -> Destinations:
        """Of a tensor that this rank serves nothing of."""
        return cls(Entry(torch.Size(shape), dtype))

    def num_holders(self, num_ranks: int) -> int:
        """How many of these ranks serve each element, if all serve as many.

        Where ranks share a KV head, several ranks serve its weights. Where a tensor
        does not divide evenly, the result is 1.
        """
        holders, rest = divmod(self._num_served * num_ranks, max(1, self._numel))
        return holders if holders and not rest else 1

    def is_whole(self, copied: Copied) -> bool:
        """Whether a copy takes every element of the tensor."""
        return prod(copied.part[1]) == self._numel

    def find(self, places: torch.Tensor) -> Iterator[Found]:
        """The elements of each parameter.

        Args:
            places: numbers of elements in the row-major tensor, int64 [n], on any
                device.

        """
        for copied in self.copies:
            offsets, inside = follow(places, copied.part, copied.view)
            if self.is_whole(copied):
                yield Found(copied.param, None, offsets)  # no look at the GPU
                continue
            (chosen,) = inside.nonzero(as_tuple=True)
            if len(chosen):
                yield Found(copied.param, chosen, offsets[chosen])


class KnownDestinations:
    """The places of the tensors of one model; kept on the module of its second tree."""

    def __init__(self) -> None:
        self._found: dict[str, Destinations] = {}

    @classmethod
    def of(cls, module: torch.nn.Module) -> Self:
        """What is known of the tensors that a module is loaded from."""
        if (known := recall(module, cls)) is None:
            ModelState.of(module).set(known := cls())
        return known

    def __len__(self) -> int:
        return len(self._found)

    def find(self, name: str, entry: Entry | None) -> Destinations | None:
        """The places of a tensor with this entry, as of `Destinations.of`."""
        known = self._found.get(name)
        if known is None or known.entry is not entry:
            if (known := Destinations.of(entry)) is None:
                return None
            self._found[name] = known
        return known


def follow(
    places: torch.Tensor, part: View, view: View
) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow elements from a part of one tensor into a view of another.

    Args:
        places: element numbers in the first tensor, int64 [n].
        part: a part of the first tensor, whose strides nest; see `nests`.
        view: of the same shape.

    Returns:
        the element numbers in the second tensor, and whether each place is inside the
        part. The number of a place that is outside means nothing.

    """
    first, shape, stride = part
    left = places - first
    offsets = torch.full_like(places, view[0])
    inside = left >= 0
    for size, step, to in widest_first(shape, stride, view[2]):
        index = left.div(step, rounding_mode="floor")
        left = left - index * step
        offsets += index * to
        inside &= index < size
    inside &= left == 0
    return offsets, inside


def nests(part: View) -> bool:
    """Whether each element number has one place in a part, found dimension by
    dimension.

    All parts that slices of a row-major tensor can be are so, whatever the order of
    their dimensions.
    """
    _, shape, stride = part
    reach = 1
    for size, step, _ in reversed(widest_first(shape, stride, stride)):
        if step < reach:
            return False
        reach += (size - 1) * step
    return True


def _is_plain(copied: Copied) -> bool:
    has_elements = prod(copied.part[1]) > 0
    is_plain = copied.is_exact and has_elements and is_short(copied.part, copied.view)
    return is_plain and nests(copied.part)


def is_short(part: View, view: View) -> bool:
    """Whether kernels follow a part of a tensor into a view, and the log its offsets.

    The log of changed elements has 32 bits for each offset.
    """
    has_few = len(dims_of(part, view)) <= MOST_DIMS
    return has_few and view[0] + span(view) < 1 << 31


def widest_first(
    shape: Sequence[int], stride: Sequence[int], other: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(size, stride, other stride) of the dimensions that are longer than one."""
    dims = [dim for dim in zip(shape, stride, other, strict=True) if dim[0] > 1]
    return sorted(dims, key=lambda dim: -dim[1])


def _is_flat(copied: Copied) -> bool:
    """Whether part and view are both in one piece, in the same order."""
    (_, shape, stride), view = copied.part, copied.view
    reach = 1
    for size, step, to in reversed(widest_first(shape, stride, view[2])):
        if step != reach or to != reach:
            return False
        reach *= size
    return True


def dims_of(part: View, view: View) -> list[tuple[int, int, int]]:
    """(size, stride, stride in the view) of the dimensions, the widest first.

    Dimensions that lie in one piece on both sides are one. So a copy of a whole tensor,
    as of the five dimensions of a patch embedding, has one.
    """
    _, shape, stride = part
    dims: list[tuple[int, int, int]] = []
    for size, step, to in widest_first(shape, stride, view[2]):
        if dims and dims[-1][1:] == (size * step, size * to):
            size *= dims.pop()[0]
        dims.append((size, step, to))
    return dims


def steps_of(part: View, view: View) -> list[int]:
    """A row of `Destinations.steps`, for a part of a tensor and the view it goes to."""
    dims = dims_of(part, view)
    dims += [(1, NEVER, 0)] * (MOST_DIMS - len(dims))
    return [part[0], view[0], *(number for dim in dims for number in dim)]


def run_of(steps: list[int]) -> int:
    """The run of a row of `Destinations.steps`; see `Destinations.runs`."""
    dims = [steps[at : at + 3] for at in range(2, len(steps), 3) if steps[at] > 1]
    if not dims or dims[-1][1:] != [1, 1]:
        return 1
    return gcd(dims[-1][0], *(number for dim in dims[:-1] for number in dim[1:]))
