"""The delta of one publish: what has changed since the version published last."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from vllm.inflight import ops
from vllm.inflight.delta.decode import Changes, apply, decode
from vllm.inflight.delta.encode import Encoder
from vllm.inflight.delta.part import Part
from vllm.inflight.trainer.published import PublishedVersion
from vllm.inflight.trainer.snapshot import (
    NUM_DIGEST_THREADS,
    Snapshot,
    check_tensor,
)
from vllm.inflight.trainer.sources.stream import Pair
from vllm.inflight.update import Manifest, TensorSpec

POLICIES = ("auto", "off", "always")

WHOLE_FROM = 0.25
"""Share of a version's bytes from which the policy `auto` sends the version whole."""

LOOKED_AT_BYTES = 16 << 20
"""Bytes that are compared before that share is believed."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Delta:
    """The changes from one version to the next, and the tensors they lead to."""

    base: PublishedVersion
    base_digest: str
    """The digest of `base` when the delta was made."""
    parts: list[Part] = field(default_factory=list)
    changed: dict[str, TensorSpec] = field(default_factory=dict)
    """The changed tensors, in the order of their numbers, as they are afterwards."""
    _decoded: tuple[int, list[Changes]] = (-1, [])
    """The number of the part that was decoded last, and its changes."""
    is_applied: bool = False
    """Whether `base` has become the version that the delta leads to."""

    def manifest(self, step: int | None) -> Manifest:
        """The manifest of the delta."""
        return Manifest(self.changed, step=step, base=self.base_digest)

    def whole(self, names: Iterable[str] | None = None) -> Iterator[Pair]:
        """The tensors that the delta leads to; by default all of the version."""
        for name in self.base.specs if names is None else names:
            tensor = self.base.tensor(name)
            assert tensor is not None
            if name in self.changed:
                tensor = tensor.clone()
                for changes in self._changes_of(name):
                    apply(changes, tensor.view(-1))
            yield name, tensor

    def _changes_of(self, name: str) -> Iterator[Changes]:
        """The changes of one tensor. Decoded when they are needed, since that takes
        many times the bytes of the parts."""
        number = list(self.changed).index(name)
        for at, part in enumerate(self.parts):
            if number in part.rows["number"]:
                if self._decoded[0] != at:
                    self._decoded = at, list(decode(part))
                yield from (c for c in self._decoded[1] if c.number == number)

    def commit(self) -> PublishedVersion:
        """The base, brought to the version that the delta leads to."""
        self.is_applied = True
        names = list(self.changed)
        changes = ((names[c.number], c) for part in self.parts for c in decode(part))
        self.base.advance(changes, self.changed)
        return self.base


class DeltaSearch:
    """Compares a source with the version published last, tensor by tensor.

    Args:
        base: the version published last.
        policy: `auto` gives up where the whole version is cheaper to send.

    """

    def __init__(self, base: PublishedVersion, policy: str) -> None:
        self._delta = Delta(base, base.digest)
        self._policy = policy
        self._encoder = Encoder()
        self._names: list[str] = []
        """The changed tensors, by their number."""
        self._num_bytes = 0
        """Bytes of the parts."""
        self._num_compared = 0
        """Bytes of the tensors compared so far."""

    def run(self, pairs: Iterable[Pair], directory: Path | None) -> Delta | Snapshot:
        """The delta, or a snapshot of all tensors where no delta is to be sent.

        Args:
            pairs: all tensors of the source; each may change once the next one is
                taken.
            directory: the directory of a snapshot; by default shared memory.

        Raises:
            Malformed: two tensors have one name.
            OSError: there is no room for a snapshot.

        """
        taken: dict[str, None] = {}
        incoming = iter(pairs)
        for name, tensor in incoming:
            check_tensor(name, tensor, taken)
            if not self._add(name, tensor):
                # What was compared so far is made again from the base.
                before = self._before(taken)
                return Snapshot.pack(
                    chain(before, [(name, tensor)], incoming), directory
                )
            taken[name] = None
        self._note(self._encoder.finish())
        if len(taken) < len(self._delta.base.specs) or self._is_dear():
            return Snapshot.pack(self._before(taken), directory)
        if not self._names:
            self._add_nothing()
        return self._delta

    def _add(self, name: str, tensor: torch.Tensor) -> bool:
        """Compare a tensor; False if the version has to be sent whole."""
        base = self._delta.base.tensor(name)
        if base is None or (base.shape, base.dtype) != (tensor.shape, tensor.dtype):
            return False
        here = tensor.detach().cpu().contiguous().resolve_neg()
        self._names.append(name)
        self._note(self._encoder.add(len(self._names) - 1, base, here))
        if self._encoder.has_changed:
            # Of the tensor itself, and not worked out from the base: an error in the
            # base would stay unseen, because digests add up.
            (digest,) = ops.digest([here], num_threads=NUM_DIGEST_THREADS)
            self._announce(name, digest.hex())
        else:
            self._names.pop()
        self._num_compared += base.nbytes
        return self._num_compared < LOOKED_AT_BYTES or not self._is_dear()

    def _note(self, parts: Iterable[Part]) -> None:
        """Keep these parts."""
        for part in parts:
            self._delta.parts.append(part)
            self._num_bytes += part.num_bytes
            part.check(*self._sizes())

    def _announce(self, name: str, digest: str | None) -> None:
        """The delta changes a tensor, which has this digest afterwards."""
        spec = self._delta.base.specs[name]
        changed = TensorSpec(name, spec.shape, spec.dtype, digest)
        self._delta.changed[name] = changed

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Elements of each tensor named so far, and bytes of an element."""
        named = [self._delta.base.tensor(name) for name in self._names]
        known = [tensor for tensor in named if tensor is not None]
        return [t.numel() for t in known], [t.element_size() for t in known]

    def _is_dear(self) -> bool:
        """Whether the whole version would cost less than this delta."""
        is_dear = self._num_bytes >= WHOLE_FROM * self._num_compared
        return is_dear and self._policy == "auto"

    def _before(self, taken: Iterable[str]) -> Iterator[Pair]:
        self._note(self._encoder.finish())
        return self._delta.whole(taken)

    def _add_nothing(self) -> None:
        """Have the delta name one tensor, although nothing has changed."""
        name = min(self._delta.base.specs, key=lambda n: _size(self._delta.base, n))
        self._names.append(name)
        tensor = self._delta.base.tensor(name)
        assert tensor is not None
        first = tensor.view(-1)[:1]
        place = torch.zeros(1, dtype=torch.int64)
        self._announce(name, self._delta.base.specs[name].digest)
        self._note(self._encoder.add_places(0, place, first, first))
        self._note(self._encoder.finish())


def _size(base: PublishedVersion, name: str) -> int:
    tensor = base.tensor(name)
    return 0 if tensor is None else tensor.numel() or 1 << 62
