"""What one set of weights holds, as a trainer would tell it: tensor by tensor.

The set itself is in the engine's names, shards and layout. What came in is kept beside
it in the checkpoint's, as far as it is known: of a version that was received whole, and
of a subset on top of one. Of the weights that an engine starts with nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm.inflight import ops
from vllm.inflight.update import DRAFT
from vllm.inflight.worker.verify.drift import Samples

Facts = tuple[str, tuple[int, ...], tuple[int, int]]
"""Dtype, shape, and the two halves of the digest of the content.

Tuples of what holds nothing else are soon left alone by collections of garbage, which
objects of our own never are; of ten thousand tensors that would be felt.
"""


@dataclass(frozen=True, slots=True)
class Content:
    """Of one version, or of the part of it that one update brings."""

    facts: Mapping[str, Facts]
    samples: Samples
    """For its drift from another; see drift.py."""

    def digest(self) -> str:
        """The manifest digest over all of it."""
        return ops.manifest_digest((name, *facts) for name, facts in self.facts.items())

    def of_target(self) -> Content:
        """Without what is a drafter's: that decides no token, and is in no digest."""
        if not any(name.startswith(DRAFT) for name in self.facts):
            return self
        facts = {n: of for n, of in self.facts.items() if not n.startswith(DRAFT)}
        return Content(facts, self.samples.only(facts.__contains__))

    def over(
        self,
        base: Content | None,
        is_spare: Callable[[str], bool] = lambda name: False,
    ) -> Content | None:
        """The whole version that is `base` with these tensors instead of its own.

        None if that is not known: nothing is known of `base`, or it has no tensor of
        that name. Some loaders take one tensor under two names. What came under the
        other one is not served any more then, and its digest would stay.

        Args:
            base: what the rest is of.
            is_spare: whether a tensor fills nothing; then its name does not matter.

        """
        if base is None:
            return None
        if any(name not in base.facts and not is_spare(name) for name in self.facts):
            return None
        return Content({**base.facts, **self.facts}, self.samples.over(base.samples))
