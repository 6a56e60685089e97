"""Tensor slices (shards), as a tensor-parallel trainer holds them.

A tensor may be listed slice by slice: entries with one name, which follow one another
in any order. Every worker puts the slices together to the tensor of the checkpoint. So
digest, replay plan and destination are the same as for a tensor in one piece.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, count, groupby, repeat
from typing import Any, NamedTuple

import torch

from vllm.inflight.errors import Cause, WeightsMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The place of a slice in its tensor. The slice's shape is in its entry."""

    dim: int
    """The dimension that the tensor is cut along, from 0."""
    start: int
    """The slice's first index in that dimension."""
    size: int
    """The size of the whole tensor in that dimension."""
    rank: int | None = None
    """The tensor-parallel rank that holds the slice, if any. Several ranks may hold the
    same slice. A worker uses the slice of its own rank, or else of the lowest rank."""

    @classmethod
    def parse(cls, name: str, given: object) -> Shard | None:
        """Read an entry of `shards`; raises `ValueError` naming what is wrong."""
        if given is None:
            return None
        known = {field.name for field in fields(cls)}
        if not isinstance(given, dict) or not known - {"rank"} <= given.keys() <= known:
            raise ValueError(
                f"{name!r}: a shard is null or has dim, start, size and, if there is "
                f"one, rank; got {given!r:.200}"
            )
        for key, value in given.items():
            is_number = type(value) is int and value >= 0
            if not is_number and not (key == "rank" and value is None):
                raise ValueError(f"{name!r}: a shard's {key} cannot be {value!r:.80}")
        return cls(**given)

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of a tensor's slices: start, then rank."""
        return self.start, -1 if self.rank is None else self.rank

    @property
    def plain(self) -> dict[str, Any]:
        """The slice as JSON, as `parse` reads it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A slice as runs of elements: one run in each row of its tensor."""

    entry: int
    """The index of the slice's entry in the tensor list."""
    num_rows: int
    """The number of rows: the product of the dimensions before the cut one."""
    first: int
    """The first element of the run in each row of the tensor."""
    width: int
    """The number of elements of a run."""

    def lay(self, tensor: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Copy elements of the slice to their places in the tensor.

        Args:
            tensor: the whole tensor, contiguous, [n].
            start: the index of the first copied element in the slice.
            data: the copied elements, [m].

        """
        runs = tensor.view(self.num_rows, -1)[:, self.first : self.first + self.width]
        while data.numel():
            row, column = divmod(start, self.width)
            num_rows = data.numel() // self.width
            if column or not num_rows:  # a piece of a run
                taken = min(self.width - column, data.numel())
                runs[row, column : column + taken].copy_(data[:taken])
            else:
                taken = num_rows * self.width
                runs[row : row + num_rows].copy_(data[:taken].view(num_rows, -1))
            start, data = start + taken, data[taken:]


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the checkpoint, and the entries that bring it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[Mapping[int | None, TensorSlice], ...]
    """For each part of the tensor, in order: rank -> that rank's slice, the lowest rank
    first."""
    num_bytes: int = field(init=False)
    """The size of the whole tensor, in bytes."""

    def __post_init__(self) -> None:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        object.__setattr__(self, "num_bytes", num_bytes)

    def taken(self, rank: int | None) -> Iterator[TensorSlice]:
        """The slices that a worker of a tensor-parallel rank uses."""
        for held in self.places:
            yield held.get(rank) or next(iter(held.values()))


@functools.lru_cache(maxsize=8)
def assemble(
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[tuple[int, ...], ...],
    shards: tuple[Shard | None, ...],
) -> tuple[WholeTensor, ...]:
    """The whole tensors that entries make up, in order; empty `shards` means no slices.

    The result is cached, because every update asks for the same.

    Raises:
        WeightsMismatch: slices leave a gap in their tensor, overlap, or do not follow
            one another; the error names the tensor.

    """
    if not any(shards):
        return tuple(map(_uncut, count(), names, dtypes, shapes))
    entries = map(_Entry, count(), names, dtypes, shapes, chain(shards, repeat(None)))
    runs = [list(run) for _, run in groupby(entries, key=lambda e: (e.name, e.is_cut))]
    num_runs = Counter(run[0].name for run in runs if run[0].is_cut)
    found: list[WholeTensor] = []
    for run in runs:
        if num_runs[run[0].name] > 1:
            raise _wrong(run[0].name, "its slices do not follow one another")
        if run[0].is_cut:
            found.append(_joined(run))
            continue
        found += [_uncut(*entry[:4]) for entry in run]
    return tuple(found)


def _uncut(
    number: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> WholeTensor:
    part = TensorSlice(number, 1, 0, math.prod(shape))
    return WholeTensor(name, dtype, shape, ({None: part},))


class _Entry(NamedTuple):
    number: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: Shard | None

    @property
    def is_cut(self) -> bool:
        return self.shard is not None


def _joined(run: list[_Entry]) -> WholeTensor:
    """The whole tensor that all slices of one name make up."""
    name = run[0].name
    cuts = [(entry, entry.shard) for entry in run if entry.shard is not None]
    forms = {_form(entry, shard) for entry, shard in cuts}
    if len(forms) > 1:
        found = ", ".join(sorted(f"{list(s)} {d} by dim {dim}" for d, s, dim in forms))
        raise _wrong(name, f"its slices are not of one tensor but of {found}")
    ((dtype, whole, dim),) = forms
    num_rows, inner = math.prod(whole[:dim]), math.prod(whole[dim + 1 :])
    places: list[dict[int | None, TensorSlice]] = []
    begin = end = 0
    for entry, shard in sorted(cuts, key=lambda cut: cut[1].order):
        length = entry.shape[dim]
        part = TensorSlice(entry.number, num_rows, shard.start * inner, length * inner)
        ends = shard.start + length
        if shard.start == end:
            places.append({shard.rank: part})
            begin, end = end, ends
        elif shard.start > end:
            raise _wrong(name, f"no slice has [{end}, {shard.start}) of dim {dim}")
        elif (shard.start, ends) == (begin, end) and _is_other(shard.rank, places[-1]):
            places[-1][shard.rank] = part
        else:
            raise _wrong(name, f"slices overlap at {shard.start} of dim {dim}")
    if end < whole[dim]:
        raise _wrong(name, f"no slice has [{end}, {whole[dim]}) of dim {dim}")
    return WholeTensor(name, dtype, whole, tuple(places))


def _form(entry: _Entry, shard: Shard) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Dtype and shape of a slice's whole tensor, and the dimension of the cut."""
    _, name, dtype, shape, _ = entry
    dim, size = shard.dim, shard.size
    if dim >= len(shape):
        raise _wrong(name, f"there is no dim {dim} in the shape {list(shape)}")
    if 0 in shape:
        raise _wrong(name, "one of its slices has no elements; leave that out")
    ends = shard.start + shape[dim]
    if ends > size:
        at = f"[{shard.start}, {ends})"
        raise _wrong(name, f"a slice {at} is outside dim {dim}, of {size}")
    return dtype, (*shape[:dim], size, *shape[dim + 1 :]), dim


def _is_other(rank: int | None, held: Mapping[int | None, TensorSlice]) -> bool:
    return rank is not None and None not in held and rank not in held


def _wrong(name: str, what: str) -> WeightsMismatch:
    return WeightsMismatch(f"{name!r}: {what}", named={Cause.SHAPE: [name]})
