"""The deltas that were committed last, for engines that have missed some of them.

An engine that was rolled back, or started again with an older version, rejects the next
delta: its base is another version. If the deltas in between are known, one delta leads
there from what the engine serves. It has the new bits of every element that one of them
has changed, so it is right for each version between that one and the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch

from vllm.inflight.delta.encode import Encoder
from vllm.inflight.delta.part import Part
from vllm.inflight.errors import ConfigError
from vllm.inflight.ops import INTEGERS
from vllm.inflight.trainer.deltas.batches import WHOLE_FROM
from vllm.inflight.trainer.deltas.delta import Delta, DeltaBody
from vllm.inflight.trainer.sources.stream import Pair
from vllm.inflight.update import TensorSpec

KEPT_DELTAS = 4
"""Deltas that are kept, if a trainer does not say how many."""


@dataclass(frozen=True, slots=True)
class _Link:
    """One committed delta: the digests of both versions, and what it changes."""

    base: str
    target: str
    body: DeltaBody


class DeltaChain:
    """The last committed deltas, each of which starts where the one before leads to.

    Together they have less than a quarter of the bytes of a version. They are kept
    where the trainer has found them.

    Args:
        length: deltas that are kept at most; 0: none.

    Raises:
        ConfigError: this is no such number.

    """

    def __init__(self, length: int = KEPT_DELTAS) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ConfigError(
                f"delta_chain is a number of deltas, or 0, got {length!r}"
            )
        self._links: deque[_Link] = deque(maxlen=length)

    @property
    def num_bytes(self) -> int:
        """Bytes of the deltas that are kept."""
        return sum(link.body.num_bytes for link in self._links)

    def clear(self) -> None:
        """Keep none: what is published now was no delta."""
        self._links.clear()

    def note(self, delta: Delta) -> None:
        """Keep a delta that was committed, here and on the engines."""
        if self._links and self._links[-1].target != delta.base_digest:
            self.clear()
        delta.body.drop_decoded()
        self._links.append(_Link(delta.base_digest, delta.base.digest, delta.body))
        most = WHOLE_FROM * delta.base.num_bytes
        while self._links and self.num_bytes >= most:
            self._links.popleft()

    def since(
        self,
        served: Collection[str],
        delta: Delta,
        policy: str,
        whole_from: float = WHOLE_FROM,
    ) -> Delta | None:
        """One delta from older versions to that which `delta` leads to.

        Args:
            served: the digests of the versions to start from. The result is right for
                each of them.
            delta: the newest one, which is not committed yet.
            policy: `auto` gives up where the whole version is cheaper to send.
            whole_from: share of its bytes from which it is.

        Returns:
            The delta, with the oldest of these versions as its base; None if a version
            is not known, or the whole one is cheaper.

        """
        links = list(self._links)
        if not links or links[-1].target != delta.base_digest:
            return None
        bases = [link.base for link in links] + [delta.base_digest]
        # Of two places with one digest, the later one has less to send.
        places = {digest: place for place, digest in enumerate(bases)}
        if not set(served) <= places.keys():
            return None
        first = min(places[digest] for digest in served)
        bodies = [*(link.body for link in links[first:]), delta.body]
        most = whole_from * delta.base.num_bytes if policy == "auto" else inf
        specs = delta.base.specs | delta.body.changed
        names = [name for name in specs if any(name in body.changed for body in bodies)]
        changed = {name: specs[name] for name in names}
        body = union(bodies, changed, delta.whole(names), most)
        return None if body is None else Delta(delta.base, bases[first], body)


def union(
    bodies: Sequence[DeltaBody],
    changed: Mapping[str, TensorSpec],
    tensors: Iterable[Pair],
    most: float = inf,
) -> DeltaBody | None:
    """The present bits of all elements that one of some deltas changes.

    Args:
        bodies: the deltas; their parts are checked.
        changed: the tensors that one of them changes, as they are now.
        tensors: these, in the same order, contiguous.
        most: bytes from which on there is none.

    """
    found = DeltaBody(changed=dict(changed))
    sizes: list[tuple[int, int]] = []
    # Not as differences: the versions to start from have different bits there.
    encoder = Encoder(values="raw")

    def take(parts: list[Part]) -> bool:
        for part in parts:
            part.check(*(list(each) for each in zip(*sizes, strict=True)))
            found.parts.append(part)
        return found.num_bytes < most

    for number, (name, tensor) in enumerate(tensors):
        sizes.append((tensor.numel(), tensor.element_size()))
        flat = tensor.view(-1).view(INTEGERS[tensor.element_size()])
        has_changed = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
        for body in bodies:
            for changes in body.changes_of(name):
                has_changed[changes.places] = True
        places = has_changed.nonzero().view(-1)
        bits = flat[places]
        if not take(list(encoder.add_places(number, places, bits, bits))):
            return None
    for body in bodies:
        body.drop_decoded()
    return found if take(list(encoder.finish())) else None
