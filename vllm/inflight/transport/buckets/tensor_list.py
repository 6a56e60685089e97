"""An announcement: names, dtypes and shapes of the tensors that are about to come.

In upstream's words (`names`, `dtype_names`, `shapes`) it is the `update_info` of an
update; both ends derive from it what is in which bucket. An entry may be a slice of its
tensor: then `shards` says which (see tensor_slices.py).
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
    put_together,
)

Pair = tuple[str, torch.Tensor]

MOST_BUCKETS = 1 << 20
"""Of an update: 16 TiB in those of 16 MiB."""

LARGEST_SIZE = (1 << 63) - 1
"""Of a dimension: what torch counts with."""


@dataclass(frozen=True, slots=True)
class TensorList:
    """What is going to be sent, in order; checked, so that it can be believed."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    shards: tuple[Shard | None, ...] = ()
    """Of the entries that are slices; empty if none is."""

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
        """Read upstream's three lists, and the shards if there are any.

        Raises:
            ValueError: one of them cannot be read; it names what is wrong.
            WeightsMismatch: slices do not make their tensor.

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
        """Announce tensors that are at hand."""
        facts = [(name, t.dtype, tuple(t.shape)) for name, t in pairs]
        names, dtypes, shapes = zip(*facts, strict=True) if facts else ((), (), ())
        return cls(names, dtypes, shapes)

    @property
    def update_info(self) -> dict[str, Any]:
        """Plain data, for the `update_weights` of an engine."""
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
        """Bytes of each entry."""
        return [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def wholes(self) -> tuple[WholeTensor, ...]:
        """The tensors that the entries make, in order."""
        return put_together(self.names, self.dtypes, self.shapes, self.shards)

    def require_ranks(self, num_ranks: int) -> None:
        """Raise `WeightsMismatch` if a slice is of a rank that there is not."""
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
        """Raise `Malformed` if it would take absurdly many buckets of that size.

        Each is planned before the first comes, and a shape is only a few bytes to send.
        """
        total = sum(sizes := self.sizes)
        if total // bucket_bytes <= MOST_BUCKETS:
            return
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        raise Malformed(
            f"{total} bytes are announced, in more than {MOST_BUCKETS} buckets of "
            f"{bucket_bytes}; the largest is {self.names[largest]!r:.300} with the "
            f"shape {self.shapes[largest]!r:.300}"
        )

    def checked(self, pairs: Iterable[Pair]) -> Iterator[tuple[int, torch.Tensor]]:
        """The bytes of each tensor of `pairs`, with its index; in order, as announced.

        Raises:
            ValueError: they are not what was announced; the receivers, who wait for
                that, would read one tensor as another.

        """
        index = -1
        for index, (name, tensor) in enumerate(pairs):
            if index == len(self.names):
                raise ValueError(f"{name!r} was not announced")
            found = name, tensor.dtype, tuple(tensor.shape)
            expected = self.names[index], self.dtypes[index], self.shapes[index]
            if found != expected:
                raise ValueError(f"announced was {expected}, to be sent is {found}")
            yield index, _bytes(tensor)
        if index + 1 < len(self.names):
            raise ValueError(
                f"{self.names[index + 1]!r} and what follows it were announced, but "
                "there are no more tensors"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


# Decoding waits for what is done here, and there may be ten thousand tensors: what can
# be looked at all together is, and one by one only if something is wrong.


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
        if are_sizes and max(sizes, default=0) <= LARGEST_SIZE:
            return tuple(map(tuple, given))
    return tuple(map(_shape, names, given))


def _dtype(name: str, dtype_name: Any) -> torch.dtype:
    plain = dtype_name.removeprefix("torch.") if isinstance(dtype_name, str) else ""
    dtype = getattr(torch, plain, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r}: there is no dtype {dtype_name!r}")
    return dtype


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or not all(
        type(size) is int and 0 <= size <= LARGEST_SIZE for size in shape
    ):
        raise ValueError(f"{name!r} cannot have the shape {shape!r:.300}")
    return tuple(shape)
