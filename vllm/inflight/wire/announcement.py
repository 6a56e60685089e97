"""An announcement: names, dtypes and shapes of the tensors that are about to come.

In upstream's words (`names`, `dtype_names`, `shapes`) it is the `update_info` of an
update; both ends derive from it what is in which bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Pair = tuple[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is going to be sent, in order; checked, so that it can be believed."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(
        cls, names: Sequence[Any], dtype_names: Sequence[Any], shapes: Sequence[Any]
    ) -> Announcement:
        """Read upstream's three lists; raises `ValueError` naming what is wrong."""
        for key, value in {
            "names": names,
            "dtype_names": dtype_names,
            "shapes": shapes,
        }.items():
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
            tuple(map(_dtype, names, dtype_names)),
            tuple(map(_shape, names, shapes)),
        )

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> Announcement:
        """Announce tensors that are at hand."""
        facts = [(name, t.dtype, tuple(t.shape)) for name, t in pairs]
        names, dtypes, shapes = zip(*facts, strict=True) if facts else ((), (), ())
        return cls(names, dtypes, shapes)

    @property
    def update_info(self) -> dict[str, Any]:
        """Plain data, for the `update_weights` of an engine."""
        return {
            "names": list(self.names),
            "dtype_names": [str(d).removeprefix("torch.") for d in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
        }

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

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


def _dtype(name: str, dtype_name: Any) -> torch.dtype:
    dtype = getattr(torch, dtype_name, None) if isinstance(dtype_name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r}: there is no dtype {dtype_name!r}")
    return dtype


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or not all(
        type(size) is int and size >= 0 for size in shape
    ):
        raise ValueError(f"{name!r} cannot have the shape {shape!r}")
    return tuple(shape)
