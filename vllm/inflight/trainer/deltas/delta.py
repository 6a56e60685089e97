"""The delta of one publish: what has changed since the version published last."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from vllm.inflight import ops
from vllm.inflight.delta.decode import apply, decode
from vllm.inflight.delta.decoded import Changes
from vllm.inflight.delta.part import Part, bring_tables
from vllm.inflight.errors import (
    BaseMismatch,
    DeltaUnsupported,
    EngineFault,
    Malformed,
    WeightsMismatch,
)
from vllm.inflight.trainer.deltas.batches import (
    WHOLE_FROM,
    BatchedSearch,
    batch_bytes,
)
from vllm.inflight.trainer.deltas.published import Digests, PublishedVersion
from vllm.inflight.trainer.snapshot import Snapshot, check_tensor
from vllm.inflight.trainer.sources.stream import Pair
from vllm.inflight.update import Manifest, TensorSpec

POLICIES = ("auto", "off", "always")

OF_A_DELTA = (
    BaseMismatch,
    DeltaUnsupported,
    EngineFault,
    Malformed,
    WeightsMismatch,
)
"""Errors after which the whole version is sent in place of a delta."""

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")

MOST_UNSUPPORTED = 3
"""After so many deltas that an engine could not apply, none is tried any more."""


@dataclass(slots=True)
class DeltaBody:
    """The changes of a delta, and what the changed tensors are afterwards."""

    parts: list[Part] = field(default_factory=list)
    changed: dict[str, TensorSpec] = field(default_factory=dict)
    """The changed tensors, in the order of their numbers, as they are afterwards."""
    _numbers: dict[str, int] = field(default_factory=dict)
    """Name → number, once all of them are known."""
    _decoded: tuple[int, list[Changes]] = (-1, [])
    """The number of the part that was decoded last, and its changes."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.num_bytes for part in self.parts)

    def changes_of(self, name: str) -> Iterator[Changes]:
        """The changes of one tensor, in the order of their places.

        They are decoded when they are needed, since that takes many times the bytes of
        the parts.
        """
        if len(self._numbers) != len(self.changed):
            self._numbers = {each: n for n, each in enumerate(self.changed)}
        number = self._numbers.get(name, -1)
        for at, part in enumerate(self.parts):
            if number in part.rows["number"]:
                if self._decoded[0] != at:
                    self._decoded = at, list(decode(part))
                yield from (c for c in self._decoded[1] if c.number == number)

    def drop_decoded(self) -> None:
        """Free what was decoded."""
        self._decoded = -1, []


@dataclass(slots=True)
class Delta:
    """The changes from one version to the next, and the tensors they lead to."""

    base: PublishedVersion
    """What is kept of the version published last."""
    base_digest: str
    """The digest of the version that the delta starts from: that of `base` when the
    delta was made, or of an older one."""
    body: DeltaBody = field(default_factory=DeltaBody)
    is_applied: bool = False
    """Whether `base` has become the version that the delta leads to."""

    def manifest(self, step: int | None) -> Manifest:
        """The manifest of the delta."""
        return Manifest(self.body.changed, step=step, base=self.base_digest)

    def whole(self, names: Iterable[str] | None = None) -> Iterator[Pair]:
        """The tensors that the delta leads to; by default all of the version."""
        for name in self.base.specs if names is None else names:
            tensor = self.base.tensor(name)
            assert tensor is not None
            if name in self.body.changed:
                tensor = tensor.clone()
                for changes in self.body.changes_of(name):
                    apply(changes, tensor.view(-1))
            yield name, tensor

    def commit(self) -> PublishedVersion:
        """The base, brought to the version that the delta leads to."""
        self.is_applied = True
        self.base.advance(self.body.parts, self.body.changed)
        return self.base


class DeltaSearch:
    """Compares a source with the version published last, tensor by tensor.

    Args:
        base: the version published last.
        policy: `auto` gives up where the whole version is cheaper to send.

    """

    def __init__(
        self, base: PublishedVersion, policy: str, whole_from: float = WHOLE_FROM
    ) -> None:
        self._delta = Delta(base, base.digest)
        self._search = BatchedSearch[Pair](
            policy, whole_from=whole_from, num_bytes=base.num_bytes
        )
        self._names: list[str] = []
        """The changed tensors, by their number."""
        self._digests = Digests()
        """Of these tensors, until they are announced."""

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
        found = self.find(pairs)
        return found if isinstance(found, Delta) else Snapshot.pack(found, directory)

    def find(self, pairs: Iterable[Pair]) -> Delta | Iterator[Pair]:
        """The delta, or all tensors of the version where no delta is to be sent.

        Args:
            pairs: as in `run`. Those that are not read yet are read by the iterator
                that is returned.

        Raises:
            Malformed: two tensors have one name.

        """
        seen: dict[str, None] = {}
        compared: list[str] = []
        batch: list[Pair] = []
        num_bytes = 0
        layer: str | None = None
        incoming = iter(pairs)
        for name, tensor in incoming:
            check_tensor(name, tensor, seen)
            seen[name] = None
            base = self._delta.base.tensor(name)
            if base is None or (base.shape, base.dtype) != (tensor.shape, tensor.dtype):
                rest = chain(batch, [(name, tensor)], incoming)
                return chain(self._before(compared), rest)
            here = tensor.detach().to(base.device).contiguous().resolve_neg()
            is_own = not ops.has_memory(here) or here.data_ptr() != tensor.data_ptr()
            most = batch_bytes(base.device)
            if most and not is_own:
                here = here.clone()  # the next tensor may come in the same memory
            layer_before, layer = layer, layer_of(name)
            if batch and layer != layer_before and self._search.is_unsure:
                compared += self._compare(batch, layer_before)
                batch, num_bytes = [], 0
            batch.append((name, here))
            num_bytes += here.nbytes
            if num_bytes < most:
                continue
            compared += self._compare(batch, layer)
            if not most:  # the tensor may change from now on
                compared += self._note(self._search.finish())
            batch, num_bytes = [], 0
            if self._search.is_given_up:
                # What was compared so far is made again from the base.
                return chain(self._before(compared), incoming)
        compared += self._compare(batch, layer)
        compared += self._note(self._search.finish())
        self._search.close()
        if len(seen) < len(self._delta.base.specs) or self._search.is_dear:
            return self._before(compared)
        if not self._names:
            self._add_nothing()
        self._announce()
        return self._delta

    def _compare(self, batch: list[Pair], layer: str | None) -> list[str]:
        """Begin to compare tensors with those of the base, and finish the batch before.

        Returns the names of that one's tensors.
        """
        olds = [self._delta.base.tensor(name) for name, _ in batch]
        pairs = [
            (old, here)
            for old, (_, here) in zip(olds, batch, strict=True)
            if old is not None
        ]
        return self._note(self._search.compare(batch, pairs, layer))

    def _note(self, finished: tuple[Sequence[Pair], list[Pair]]) -> list[str]:
        """Note what has changed in a batch; returns the names of its tensors."""
        batch, changed = finished
        self._names += [name for name, _ in changed]
        # Of the tensors themselves, and not worked out from the base: an error in the
        # base would stay unseen, because digests add up.
        self._digests.add(changed)
        return [name for name, _ in batch]

    def _announce(self) -> None:
        """Announce what has changed, and check the parts.

        The host waits for a GPU here, and not at every batch.
        """
        digests = self._digests.results()  # not in the order of the numbers
        for name in self._names:
            spec = self._delta.base.specs[name]
            digest = digests[name].hex() if name in digests else spec.digest
            changed = TensorSpec(name, spec.shape, spec.dtype, digest)
            self._delta.body.changed[name] = changed
        parts, sizes = self._search.parts, self._sizes()
        self._delta.body.parts = parts
        bring_tables(parts)
        for part in parts:
            part.check(*sizes)

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Elements of each tensor named so far, and bytes of an element."""
        named = [self._delta.base.tensor(name) for name in self._names]
        known = [tensor for tensor in named if tensor is not None]
        return [t.numel() for t in known], [t.element_size() for t in known]

    def _before(self, compared: list[str]) -> Iterator[Pair]:
        """The tensors that were taken from the source, made again from the base."""
        taken = compared + self._note(self._search.finish())
        self._search.close()
        self._announce()
        return self._delta.whole(taken)

    def _add_nothing(self) -> None:
        """Have the delta name one tensor, although nothing has changed."""
        name = min(self._delta.base.specs, key=lambda n: _size(self._delta.base, n))
        self._names.append(name)
        tensor = self._delta.base.tensor(name)
        assert tensor is not None
        self._search.add_nothing(tensor)
        self._search.close()


def layer_of(name: str) -> str | None:
    """The layer that a tensor is of: its name up to the first number; None if it has
    no number."""
    found = _LAYER.match(name)
    return found[0] if found else None


def _size(base: PublishedVersion, name: str) -> int:
    tensor = base.tensor(name)
    return 0 if tensor is None else tensor.numel() or 1 << 62
