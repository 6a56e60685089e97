"""Deltas on a rank: the changed tensors are made from the served ones.

A delta arrives as parts (see delta/parts.py). Each tensor that it changes is copied
from the version that is served, and the changes are applied to the copy. The result is
loaded as any tensor is: its digest is compared with the announced one, and the model's
loader writes it into the shadow weights. So whatever was lost, repeated or taken from
another version on the way is found before the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from vllm.inflight.delta.decode import apply, decode
from vllm.inflight.delta.parts import ArrivingParts, Pair
from vllm.inflight.errors import DeltaUnsupported, Malformed
from vllm.inflight.update import TensorSpec
from vllm.inflight.worker.delta.order import Order

BaseTensor = Callable[[str], torch.Tensor | None]
"""A tensor of the version that is served, as a copy or not; None if no copy of it can
be made here."""


class DeltaTensors:
    """The changed tensors of one delta.

    Args:
        specs: the announced tensors; the parts have their numbers.
        base: finds a tensor of the version that is served. It is never written to.
        received: called with the bytes of each part.

    Raises:
        Malformed: a dtype has no bits to compare, as complex numbers have none.

    """

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        base: BaseTensor,
        received: Callable[[int], None],
    ) -> None:
        self._specs = list(specs.values())
        self._order = Order(self._specs)
        self._base = base
        self._received = received
        self._parts = ArrivingParts()
        self._number = -1
        """The tensor that is being changed."""
        self._tensor: torch.Tensor | None = None

    def tensors(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """The changed tensors, whole, from the parts of one chunk.

        The last one may go on in the next chunk; `rest` has it at the end.

        Raises:
            Malformed: a part is invalid, or the parts are not in order.
            DeltaUnsupported: there is no copy of a tensor to apply changes to.

        """
        for name, tensor in pairs:
            for part in self._parts.add(name, tensor):
                self._received(part.num_bytes)
                self._order.check(part)
                for changes in decode(part):
                    if changes.number != self._number:
                        yield from self._finished()
                        self._number = changes.number
                        self._begin(self._specs[changes.number])
                    assert self._tensor is not None
                    apply(changes, self._tensor.view(-1))
            del tensor  # a transport reuses memory that no tensor refers to

    def rest(self) -> Iterator[Pair]:
        """The last tensor; raises `Malformed` if a part has not arrived."""
        self._parts.require_all()
        yield from self._finished()

    def _begin(self, spec: TensorSpec) -> None:
        found = self._base(spec.name)
        if found is None:
            raise DeltaUnsupported(
                f"no copy of {spec.name!r} is kept here, and a delta cannot change it "
                "in the form in which it is served",
                tensors=[spec.name],
                remedy="Send the whole version with a manifest that has the digest of "
                "each tensor: copies are kept of such a version.",
            )
        form = tuple(found.shape), str(found.dtype).removeprefix("torch.")
        if form != (spec.shape, spec.dtype):
            raise Malformed(
                f"the delta announces {spec.name!r} as {list(spec.shape)} "
                f"{spec.dtype}, and {list(form[0])} {form[1]} of it is served"
            )
        self._tensor = found.clone(memory_format=torch.contiguous_format)

    def _finished(self) -> Iterator[Pair]:
        """The tensor that was being changed, if there is one."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            yield self._specs[self._number].name, tensor
