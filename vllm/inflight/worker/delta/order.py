"""The order of a delta: its tensors by number, and the elements of each by place."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from vllm.inflight.delta.decode import Changes
from vllm.inflight.errors import Malformed
from vllm.inflight.update import TensorSpec


class Order:
    """Checks that no tensor and no element of a delta comes twice.

    Args:
        specs: the announced tensors; parts have their numbers.

    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self.sizes = [prod(spec.shape) for spec in specs]
        """Elements of each tensor."""
        self.widths = [getattr(torch, spec.dtype).itemsize for spec in specs]
        """Bytes of an element of each tensor."""
        self.number = -1
        """The tensor of the changes noted last."""
        self._last = -1
        """The last element of these changes."""

    def note(self, changes: Changes) -> bool:
        """Note the next changes; returns whether they are of another tensor.

        Raises:
            Malformed: they come before changes that were noted.

        """
        is_new = changes.number != self.number
        if changes.number < self.number:
            raise Malformed(
                f"the delta changes {self._name(changes.number)} after "
                f"{self._name(self.number)}, which comes later in its manifest"
            )
        if is_new:
            self.number, self._last = changes.number, -1
        first, last = changes.places[0].item(), changes.places[-1].item()
        if first <= self._last:
            raise Malformed(
                f"the delta changes element {first} of {self._name(self.number)} "
                f"after element {self._last}; elements must come in order"
            )
        self._last = int(last)
        return is_new

    def _name(self, number: int) -> str:
        return repr(self._specs[number].name)
