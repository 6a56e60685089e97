"""The order of a delta: its tensors by number, and the elements of each by place."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod

import torch

from vllm.inflight.delta import Part
from vllm.inflight.errors import Malformed
from vllm.inflight.update import TensorSpec

MOST_ENTRIES = 1 << 26
"""Most changed elements of a part: decoding takes 12 bytes and more for each."""


class Order:
    """Checks the parts of a delta: no element comes twice, and all in order.

    Args:
        specs: the announced tensors; parts have their numbers.

    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._sizes = array("Q", [prod(spec.shape) for spec in specs])
        dtypes = {spec.dtype for spec in specs}
        widths = {dtype: getattr(torch, dtype).itemsize for dtype in dtypes}
        self._widths = array("B", [widths[spec.dtype] for spec in specs])
        self._end = (-1, 0)
        """Tensor and element up to which changes have come."""

    def check(self, part: Part) -> None:
        """Check the next part, whose blocks are in order among themselves.

        Raises:
            Malformed: its table is invalid, or it changes what comes before the changes
                of an earlier part.

        """
        part.check(self._sizes, self._widths)
        rows = part.rows
        if not len(rows):
            return
        num = int(rows["num_entries"].sum(dtype="int64"))
        if num > MOST_ENTRIES:
            raise Malformed(
                f"a part of the delta changes {num} elements; at most {MOST_ENTRIES} "
                "are decoded at once, so send smaller parts"
            )
        at, first = int(rows["number"][0]), int(rows["first"][0])
        if (at, first) < self._end:
            number, element = self._end
            raise Malformed(
                f"the delta changes element {first} of {self._specs[at].name!r} after "
                f"element {element - 1} of {self._specs[number].name!r}; its parts "
                "must come in order"
            )
        end = int(rows["first"][-1]) + int(rows["num_elements"][-1])
        self._end = int(rows["number"][-1]), end
