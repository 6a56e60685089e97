"""The parts of a delta as named tensors, which any transport can carry.

Part number 3 travels as two tensors of bytes, `delta.3.table` and `delta.3.data`. They
may arrive in any order, because files and some transports sort tensors by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from vllm.inflight.delta.part import Part
from vllm.inflight.errors import Malformed

Pair = tuple[str, torch.Tensor]

KINDS = "table", "data"

NAME = re.compile(r"delta\.(0|[1-9][0-9]{0,6})\.(table|data)").fullmatch


def named(parts: Iterable[Part], first: int = 0) -> Iterator[Pair]:
    """The tensors of `parts` under the names that they travel by.

    Args:
        parts: the next parts of a delta.
        first: the number of the first of them.

    """
    for number, part in enumerate(parts, first):
        yield f"delta.{number}.table", part.table
        yield f"delta.{number}.data", part.data


def parts_of(pairs: Iterable[Pair]) -> Iterator[Part]:
    """The parts of a delta whose tensors are named.

    Raises:
        Malformed: one of the tensors belongs to no part, or a part is not complete.

    """
    arriving = ArrivingParts()
    for name, tensor in pairs:
        yield from arriving.add(name, tensor)
    arriving.require_all()


class ArrivingParts:
    """Puts the parts of a delta together from the tensors that arrive.

    Parts come out in the order of their numbers. A part that arrives too early waits.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, torch.Tensor]] = {}
        self._next = 0

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[Part]:
        """Take one tensor; yields the parts that are complete now.

        Raises:
            Malformed: it is no tensor of a delta, or it has come before.

        """
        found = NAME(name)
        if found is None or tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise Malformed(
                f"{name!r} ({str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}) is no part of a delta: its tensors are called "
                "delta.0.table, delta.0.data, delta.1.table and so on, and are uint8 "
                "with one dimension"
            )
        number, kind = int(found[1]), found[2]
        halves = self._waiting.setdefault(number, {})
        if number < self._next or kind in halves:
            raise Malformed(f"{name!r} was sent twice")
        # A table is small, and may come at the end of a bucket whose memory is wanted
        # for what comes next, long before the data.
        halves[kind] = tensor.clone() if kind == "table" else tensor
        while (halves := self._waiting.get(self._next, {})).keys() == set(KINDS):
            del self._waiting[self._next]
            self._next += 1
            yield Part(**halves)

    def require_all(self) -> None:
        """Raise `Malformed` if a part waits for one that has not come."""
        if self._waiting:
            halves = self._waiting.get(self._next, {})
            lost = [
                f"delta.{self._next}.{kind}" for kind in KINDS if kind not in halves
            ]
            raise Malformed(
                f"the delta is not complete: {' and '.join(lost)} did not arrive"
            )
