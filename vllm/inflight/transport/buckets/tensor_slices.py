"""Shards: slices of tensors, as a trainer that is itself tensor-parallel holds them.

A tensor may be announced slice by slice: entries of one name, one behind the other, in
any order. Every worker puts them together to the tensor of the checkpoint, so that
digest, plan and place are what they are for one that comes in one piece.
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
    """Which slice of its tensor an entry is; the entry's shape is the slice's."""

    dim: int
    """The dimension that the tensor is cut along, counted from 0."""
    start: int
    """Index of the slice's first row, column, ... in it."""
    size: int
    """Of the whole tensor in that dimension."""
    rank: int | None = None
    """The tensor-parallel rank that holds it. Ranks may hold the same slice: a worker
    takes the one of its own rank, or else of the lowest."""

    @classmethod
    def parse(cls, name: str, given: Any) -> Shard | None:
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
        """By what the slices of a tensor are sorted: place, then rank."""
        return self.start, -1 if self.rank is None else self.rank

    @property
    def plain(self) -> dict[str, Any]:
        """As `parse` reads it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """An entry as a part of its tensor: a run of elements in each of some rows."""

    entry: int
    """Its index among all entries."""
    num_rows: int
    """The tensor's rows, here: all that lies before the dimension of the cut."""
    first: int
    """The first element of the run, counted in a row of the tensor."""
    width: int
    """Elements of a run."""

    def lay(self, tensor: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Copy elements of the slice to where they belong in the tensor.

        Args:
            tensor: all of it, contiguous, [n].
            start: the first of them, counted in the slice.
            data: those that follow it there, [m].

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
    """A tensor as the model knows it, and the entries that bring it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[Mapping[int | None, TensorSlice], ...]
    """For each of its parts, one behind the other, the slice of every rank that has it,
    the lowest first."""
    num_bytes: int = field(init=False)
    """Of all of it."""

    def __post_init__(self) -> None:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        object.__setattr__(self, "num_bytes", num_bytes)

    def taken(self, rank: int | None) -> Iterator[TensorSlice]:
        """The slices that the worker of a tensor-parallel rank puts together."""
        for held in self.places:
            yield held.get(rank) or next(iter(held.values()))


@functools.lru_cache(maxsize=8)
def put_together(
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[tuple[int, ...], ...],
    shards: tuple[Shard | None, ...],
) -> tuple[WholeTensor, ...]:
    """The tensors that entries make, in order; `shards` is empty if none is cut.

    They are remembered: the same are asked for at every update.

    Raises:
        WeightsMismatch: slices are not all of their tensor, or more than that, or
            do not follow one another; with its name.

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
    """The tensor that all slices of one name make."""
    name = run[0].name
    cuts = [(entry, entry.shard) for entry in run if entry.shard is not None]
    forms = {_form(entry, shard) for entry, shard in cuts}
    if len(forms) > 1:
        told = ", ".join(sorted(f"{list(s)} {d} by dim {dim}" for d, s, dim in forms))
        raise _wrong(name, f"its slices are not of one tensor but of {told}")
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
    """Dtype and shape of the tensor that a slice is of, and the dim it is cut along."""
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
