"""What the tensors of a delta are written into, as rows of numbers.

The rows follow from the replay plan and from the names of the tensors. They are kept
while the plan stays as it is. So a delta finds the rows of tensors that deltas before
it have changed, and takes no step of Python for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight import ops
from vllm.inflight.delta.decoded import Numbers, before
from vllm.inflight.update import TensorSpec
from vllm.inflight.worker.delta.destinations import MOST_DIMS, Destinations
from vllm.inflight.worker.model_state import ModelState, recall
from vllm.inflight.worker.replay_plan import Copied

Bools = NDArray[np.bool_]

Form = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of a tensor."""


class Targets(NamedTuple):
    """What some tensors are written into.

    Attributes:
        places: of each tensor.
        is_idle: for each tensor, whether the engine has no use for it.
        has_all: for each tensor, whether all of it is served on this rank, and once.
        tensors: int64 [tensors, 5]: elements, smallest magnitude that is not finite,
            byte of a NaN or -1, number of copies, and number of the first one.
        copies: of all tensors, one after the other.
        params: the parameter of each copy.
        is_cut: for each copy, whether it takes a part of its tensor alone.
        are_flat: for each copy, whether part and view are in one piece.
        steps: int64 [copies, 2 + 3 * MOST_DIMS], as of `Destinations`. A copy in one
            piece has its number of elements in place of the first size.

    """

    places: list[Destinations]
    is_idle: Bools
    has_all: Bools
    tensors: Numbers
    copies: list[Copied]
    params: list[str]
    is_cut: Bools
    are_flat: Bools
    steps: Numbers

    @classmethod
    def of(
        cls, places: Sequence[Destinations], is_idle: Sequence[bool] | None = None
    ) -> Self:
        """The targets of tensors that are served in these places."""
        copies = [copied for each in places for copied in each.copies]
        num_copies = np.array([len(each.copies) for each in places], dtype=np.int64)
        dtypes: list[torch.dtype] = [each.entry.dtype for each in places]
        tensors = np.zeros((len(places), 5), dtype=np.int64)
        tensors[:, 0] = [each.entry.shape.numel() for each in places]
        tensors[:, 1] = [ops.nonfinite_limit(dtype) for dtype in dtypes]
        tensors[:, 2] = [ops.NAN_BYTES.get(dtype, -1) for dtype in dtypes]
        tensors[:, 3], tensors[:, 4] = num_copies, before(num_copies)
        sizes = np.array([prod(copied.part[1]) for copied in copies], dtype=np.int64)
        are_flat = np.concatenate([NO_BOOLS, *(each.are_flat for each in places)])
        steps = np.concatenate([NO_STEPS, *(each.steps for each in places)])
        steps[:, 2] = np.where(are_flat, sizes, steps[:, 2])
        return cls(
            [*places],
            np.array(is_idle or [False] * len(places), dtype=bool),
            np.array([each.has_all for each in places], dtype=bool),
            tensors,
            copies,
            [copied.param for copied in copies],
            sizes != np.repeat(tensors[:, 0], num_copies),
            are_flat,
            steps,
        )

    def copies_of(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """The copies of some tensors, and for each the index of its tensor in them."""
        num_copies, first = self.tensors[numbers, 3], self.tensors[numbers, 4]
        index = np.repeat(np.arange(len(numbers)), num_copies)
        return np.arange(len(index)) - before(num_copies)[index] + first[index], index

    def only(self, numbers: Numbers) -> Targets:
        """The targets of some of the tensors."""
        copies, _ = self.copies_of(numbers)
        tensors = self.tensors[numbers]
        tensors[:, 4] = before(tensors[:, 3])
        at = copies.tolist()
        return Targets(
            [self.places[number] for number in numbers.tolist()],
            self.is_idle[numbers],
            self.has_all[numbers],
            tensors,
            [self.copies[copy] for copy in at],
            [self.params[copy] for copy in at],
            self.is_cut[copies],
            self.are_flat[copies],
            self.steps[copies],
        )

    def followed_by(self, others: Targets) -> Targets:
        """The targets of these tensors, and of others after them."""
        pairs: Iterable[tuple[Any, Any]] = zip(self, others, strict=True)
        joined = [
            one + two if isinstance(one, list) else np.concatenate((one, two))
            for one, two in pairs
        ]
        made = Targets(*joined)
        made.tensors[:, 4] = before(made.tensors[:, 3])
        return made


NO_BOOLS = np.zeros(0, dtype=bool)
NO_STEPS = np.zeros((0, 2 + 3 * MOST_DIMS), dtype=np.int64)


class KnownTargets:
    """The targets of the tensors that deltas have changed so far.

    They are kept on the module of the second tree, until the plan changes.
    """

    def __init__(self, plan_number: int) -> None:
        self._plan_number = plan_number
        self._numbers: dict[Form, int] = {}
        self._all = Targets.of([])
        self._last = np.zeros(0, dtype=np.int64), self._all
        """The tensors of the last delta, which the next one often changes as well."""

    @classmethod
    def of(cls, module: torch.nn.Module, plan_number: int) -> Self:
        """What is known of a module while its plan has this number."""
        known = recall(module, cls)
        if known is None or known._plan_number != plan_number:
            ModelState.of(module).set(known := cls(plan_number))
        return known

    def find(
        self,
        forms: Sequence[Form],
        specs: Sequence[TensorSpec],
        find: Callable[[TensorSpec], tuple[Destinations, bool]],
    ) -> Targets:
        """The targets of the tensors of a delta.

        Args:
            forms: of the tensors.
            specs: the same tensors.
            find: tells where a tensor is served that is not known yet, and whether it
                is idle; what it raises is raised here.

        """
        numbers = [*map(self._numbers.get, forms)]
        if None in numbers:
            pairs = zip(numbers, specs, strict=True)
            found = [find(spec) for number, spec in pairs if number is None]
            places, is_idle = zip(*found, strict=True)
            self._all = self._all.followed_by(Targets.of(places, is_idle))
            for form, number in zip(forms, numbers, strict=True):
                if number is None:
                    self._numbers[form] = len(self._numbers)
            numbers = [self._numbers[form] for form in forms]
        chosen = np.array(numbers, dtype=np.int64)
        if not np.array_equal(chosen, self._last[0]):
            self._last = chosen, self._all.only(chosen)
        return self._last[1]
