"""The content of one set of weights, tensor by tensor, as the trainer sent it.

The weights themselves have the engine's names, shards and layout. The facts about the
sent tensors are kept beside them: for a version that was received whole, and for a
subset on top of such a version. Nothing is known of the weights that an engine starts
with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from vllm.inflight import ops
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.verify.drift import Samples

Facts = tuple[str, tuple[int, ...], tuple[int, int]]
"""Dtype, shape, and the two halves of the digest of a tensor.

A tuple, and not an object of our own: garbage collections soon stop looking at tuples
of plain values. With ten thousand tensors that makes a difference.
"""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of one version, or of the part that one update brings."""

    facts: Mapping[str, Facts]
    samples: Samples | None
    """Used for the drift between versions; see drift.py. A delta brings those of all
    tensors."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The tensors themselves, on the CPU build, for deltas to start from. There the
    served weights are packed, so that no element has a place of its own."""
    _digests: list[str] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The manifest digest, once it was asked for: the next delta asks again."""

    def digest(self) -> str:
        """The manifest digest over all tensors."""
        if not self._digests:
            facts = [(name, *facts) for name, facts in self.facts.items()]
            self._digests.append(ops.manifest_digest(facts))
        return self._digests[0]

    def of_target(self) -> Content:
        """The content without the drafter, which decides no token."""
        if not any(name.startswith(DRAFT) for name in self.facts):
            return self
        facts = {n: of for n, of in self.facts.items() if not n.startswith(DRAFT)}
        tensors = {n: tensor for n, tensor in self.tensors.items() if n in facts}
        samples = self.samples and self.samples.only(facts.__contains__)
        return Content(facts, samples, tensors)

    def over(
        self,
        base: Content | None,
        is_spare: Callable[[str], bool] = lambda name: False,
    ) -> Content | None:
        """The whole version that is `base` with these tensors in place of its own.

        None if that is not known: nothing is known of `base`, or `base` lacks one of
        the names. Some loaders take one tensor under two names. The digest of the other
        name would stay although its tensor is not served any more.

        Args:
            base: the content of the version below.
            is_spare: whether a tensor fills nothing; then its name does not matter.

        """
        if base is None:
            return None
        if not all(map(is_spare, self.facts.keys() - base.facts.keys())):
            return None
        if self.facts.keys() >= base.facts.keys() and not base.tensors:
            return self  # nothing of `base` is left, and the digest is known
        samples = None
        if self.samples is not None and base.samples is not None:
            samples = self.samples.over(base.samples)
        return Content(
            {**base.facts, **self.facts}, samples, {**base.tensors, **self.tensors}
        )
