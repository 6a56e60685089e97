"""The tensor list: names, dtypes and shapes of an update's tensors, sent before them.

As upstream's `names`, `dtype_names` and `shapes`, it is the `update_info` of an update.
Both ends derive the bucket plan from it. An entry may be a slice of its tensor; then
`shards` has its place in the tensor (see tensor_slices.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from vllm.inflight.errors import Malformed, WeightsMismatch
from vllm.inflight.transport.buckets.tensor_slices import (
    Shard,
    WholeTensor,
    assemble,
)

Pair = tuple[str, torch.Tensor]

MAX_BUCKETS = 1 << 20
"""Most buckets of an update: 16 TiB in buckets of 16 MiB."""

MAX_DIM_SIZE = (1 << 63) - 1
"""Largest size of a dimension, as in torch."""


@dataclass(frozen=True, slots=True)
class TensorList:
    """The tensors and slices of an update, in order; valid once it is made.

    Raises:
        WeightsMismatch: slices do not make up their tensor.

    """

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: tuple[Shard | None, ...] = ()
    """The place of each entry that is a slice; empty if no entry is."""

    def __post_init__(self) -> None:
        if any(self.shards):
            self.wholes()

    @classmethod
    def parse(
        cls,
        names: Sequence[Any],
        dtype_names: Sequence[Any],
        shapes: Sequence[Any],
        shards: Sequence[Any] | None = None,
    ) -> TensorList:
        """Read upstream's three lists, and the `shards` if there are any.

        Raises:
            ValueError: a list cannot be read; the message names the entry.
            WeightsMismatch: slices do not make up their tensor.

        """
        lists = {"names": names, "dtype_names": dtype_names, "shapes": shapes}
        if shards is not None:
            lists["shards"] = shards
        for key, value in lists.items():
            if not isinstance(value, list | tuple):
                raise ValueError(f"{key!r} must be a list")
            if len(value) != len(names):
                raise ValueError(
                    f"{key!r} has {len(value)} entries, 'names' has {len(names)}"
                )
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"{name!r} in 'names' is not a string")
        return cls(
            tuple(names),
            _dtypes(names, dtype_names),
            _shapes(names, shapes),
            tuple(map(Shard.parse, names, shards or ())),
        )

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> TensorList:
        """The list of tensors that are in memory."""
        facts = [(name, t.dtype, tuple(t.shape)) for name, t in pairs]
        names, dtypes, shapes = zip(*facts, strict=True) if facts else ((), (), ())
        return cls(names, dtypes, shapes)

    @property
    def update_info(self) -> dict[str, Any]:
        """The list as `update_info` of `update_weights`."""
        info = {
            "names": list(self.names),
            "dtype_names": [str(d).removeprefix("torch.") for d in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
        }
        if any(self.shards):
            info["shards"] = [shard and shard.plain for shard in self.shards]
        return info

    @property
    def sizes(self) -> list[int]:
        """The size of each entry, in bytes."""
        return [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def wholes(self) -> tuple[WholeTensor, ...]:
        """The whole tensors that the entries make up, in order."""
        return assemble(self.names, self.dtypes, self.shapes, self.shards)

    def require_ranks(self, num_ranks: int) -> None:
        """Raise `WeightsMismatch` if a slice is for a rank that does not exist."""
        for name, shard in zip(self.names, self.shards, strict=False):
            if shard is None or shard.rank is None or shard.rank < num_ranks:
                continue
            raise WeightsMismatch(
                f"{name!r}: a slice is of rank {shard.rank}, this engine has "
                f"{num_ranks} tensor-parallel ranks; without ranks, slices may be cut "
                "for any number of them",
                tensors=[name],
                remedy="Cut slices for the ranks that this engine has, or for none.",
            )

    def require_buckets(self, bucket_bytes: int) -> None:
        """Raise `Malformed` if the tensors would need more than `MAX_BUCKETS` buckets.

        All buckets are planned before the first arrives. A hostile shape of a few bytes
        could otherwise exhaust memory.
        """
        total = sum(sizes := self.sizes)
        if total // bucket_bytes <= MAX_BUCKETS:
            return
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        raise Malformed(
            f"the tensor list has {total} bytes, in more than {MAX_BUCKETS} buckets of "
            f"{bucket_bytes}; the largest is {self.names[largest]!r:.300} with the "
            f"shape {self.shapes[largest]!r:.300}"
        )

    def checked(self, pairs: Iterable[Pair]) -> Iterator[tuple[int, torch.Tensor]]:
        """The index and the bytes of each tensor of `pairs`, which must match the list.

        Raises:
            ValueError: the tensors differ from the list. The receivers would read one
                tensor as another.

        """
        index = -1
        for index, (name, tensor) in enumerate(pairs):
            if index == len(self.names):
                raise ValueError(f"{name!r} is not in the tensor list")
            found = name, tensor.dtype, tuple(tensor.shape)
            expected = self.names[index], self.dtypes[index], self.shapes[index]
            if found != expected:
                raise ValueError(
                    f"the tensor list has {expected}, the source yields {found}"
                )
            yield index, _bytes(tensor)
        if index + 1 < len(self.names):
            raise ValueError(
                f"{self.names[index + 1]!r} and all later entries of the tensor list "
                "are missing: there are no more tensors"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


# Decoding waits while a list is read, and a list may have ten thousand tensors. So all
# entries are checked together, and one by one only to find a wrong entry.


def _dtypes(names: Sequence[str], given: Sequence[Any]) -> tuple[torch.dtype, ...]:
    if not set(map(type, given)) <= {str}:
        return tuple(map(_dtype, names, given))
    known: dict[str, torch.dtype] = {}
    for name, text in zip(names, given, strict=True):
        if text not in known:
            known[text] = _dtype(name, text)
    return tuple(map(known.__getitem__, given))


def _shapes(names: Sequence[str], given: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    if set(map(type, given)) <= {list, tuple}:
        sizes = list(chain.from_iterable(given))
        are_sizes = set(map(type, sizes)) <= {int} and min(sizes, default=0) >= 0
        if are_sizes and max(sizes, default=0) <= MAX_DIM_SIZE:
            return tuple(map(tuple, given))
    return tuple(map(_shape, names, given))


def _dtype(name: str, dtype_name: object) -> torch.dtype:
    plain = dtype_name.removeprefix("torch.") if isinstance(dtype_name, str) else ""
    dtype = getattr(torch, plain, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r}: there is no dtype {dtype_name!r}")
    return dtype


def _shape(name: str, shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or not all(
        type(size) is int and 0 <= size <= MAX_DIM_SIZE for size in shape
    ):
        raise ValueError(f"{name!r} cannot have the shape {shape!r:.300}")
    return tuple(shape)
