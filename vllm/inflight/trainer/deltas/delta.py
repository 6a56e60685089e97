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
from vllm.inflight.delta.encode import Encoder, Search
from vllm.inflight.delta.part import Part, bring_tables
from vllm.inflight.errors import (
    BaseMismatch,
    DeltaUnsupported,
    EngineFault,
    Malformed,
    WeightsMismatch,
)
from vllm.inflight.trainer.deltas.published import Digests, PublishedVersion
from vllm.inflight.trainer.snapshot import Snapshot, check_tensor
from vllm.inflight.trainer.sources.stream import Pair
from vllm.inflight.update import Manifest, TensorSpec

POLICIES = ("auto", "off", "always")

WHOLE_FROM = 0.25
"""Share of a version's bytes from which the policy `auto` sends the version whole."""

LOOKED_AT_BYTES = 16 << 20
"""Bytes that are compared before that share is believed."""

BATCH_BYTES = 1 << 30
"""Bytes of tensors that a GPU compares at once. They are copied, as a source may reuse
the memory of a tensor for the next one. Two such copies are there at a time."""

OF_A_DELTA = (
    BaseMismatch,
    DeltaUnsupported,
    EngineFault,
    Malformed,
    WeightsMismatch,
)
"""Errors after which the whole version is sent in place of a delta."""

MOST_UNSUPPORTED = 3
"""After so many deltas that an engine could not apply, none is tried any more."""

logger = logging.getLogger(__name__)


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

    def __init__(self, base: PublishedVersion, policy: str) -> None:
        self._delta = Delta(base, base.digest)
        self._policy = policy
        self._encoder = Encoder()
        self._names: list[str] = []
        """The changed tensors, by their number."""
        self._digests = Digests()
        """Of these tensors, until they are announced."""
        self._begun: tuple[list[Pair], Search] = [], Search([], None)
        """The batch that is compared now."""
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
                here = here.clone()
            batch.append((name, here))
            num_bytes += here.nbytes
            if num_bytes < most:
                continue
            compared += self._compare(batch)
            if not most:  # the tensor may change from now on
                compared += self._finish()
            batch, num_bytes = [], 0
            if self._num_compared >= LOOKED_AT_BYTES and self._is_dear():
                # What was compared so far is made again from the base.
                return chain(self._before(compared), incoming)
        compared += self._compare(batch)
        compared += self._finish()
        self._note(self._encoder.finish())
        if len(seen) < len(self._delta.base.specs) or self._is_dear():
            return self._before(compared)
        if not self._names:
            self._add_nothing()
        self._close()
        return self._delta

    def _compare(self, batch: list[Pair]) -> list[str]:
        """Begin to compare tensors with those of the base.

        Meanwhile the batch before is finished, so that a GPU has always something to
        do. Returns the names of that one's tensors.
        """
        olds = [self._delta.base.tensor(name) for name, _ in batch]
        pairs = [
            (old, here)
            for old, (_, here) in zip(olds, batch, strict=True)
            if old is not None
        ]
        search = self._encoder.search(pairs)
        names = self._finish()
        self._begun = batch, search
        return names

    def _finish(self) -> list[str]:
        """Finish the batch that was begun; returns the names of its tensors."""
        batch, search = self._begun
        self._begun = [], Search([], None)
        made = list(self._encoder.add_found(len(self._names), search))
        has_changed = self._encoder.have_changed
        changed = [pair for pair, has in zip(batch, has_changed, strict=True) if has]
        self._names += [name for name, _ in changed]
        # Of the tensors themselves, and not worked out from the base: an error in the
        # base would stay unseen, because digests add up.
        self._digests.add(changed)
        self._note(made)
        self._num_compared += sum(here.nbytes for _, here in batch)
        return [name for name, _ in batch]

    def _note(self, parts: Iterable[Part]) -> None:
        """Keep these parts."""
        for part in parts:
            self._delta.body.parts.append(part)
            self._num_bytes += part.num_bytes

    def _close(self) -> None:
        """Announce what has changed, and check the parts.

        The host waits for a GPU here, and not at every batch.
        """
        digests = self._digests.results()  # not in the order of the numbers
        for name in self._names:
            spec = self._delta.base.specs[name]
            digest = digests[name].hex() if name in digests else spec.digest
            changed = TensorSpec(name, spec.shape, spec.dtype, digest)
            self._delta.body.changed[name] = changed
        parts, sizes = self._delta.body.parts, self._sizes()
        bring_tables(parts)
        for part in parts:
            part.check(*sizes)

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Elements of each tensor named so far, and bytes of an element."""
        named = [self._delta.base.tensor(name) for name in self._names]
        known = [tensor for tensor in named if tensor is not None]
        return [t.numel() for t in known], [t.element_size() for t in known]

    def _is_dear(self) -> bool:
        """Whether the whole version would cost less than this delta."""
        is_dear = self._num_bytes >= WHOLE_FROM * self._num_compared
        return is_dear and self._policy == "auto"

    def _before(self, compared: list[str]) -> Iterator[Pair]:
        """The tensors that were taken from the source, made again from the base."""
        taken = compared + self._finish()
        self._note(self._encoder.finish())
        self._close()
        return self._delta.whole(taken)

    def _add_nothing(self) -> None:
        """Have the delta name one tensor, although nothing has changed."""
        name = min(self._delta.base.specs, key=lambda n: _size(self._delta.base, n))
        self._names.append(name)
        tensor = self._delta.base.tensor(name)
        assert tensor is not None
        first = tensor.view(-1)[:1]
        place = torch.zeros(1, dtype=torch.int64, device=first.device)
        self._note(self._encoder.add_places(0, place, first, first))
        self._note(self._encoder.finish())


def batch_bytes(device: torch.device) -> int:
    """Bytes of tensors that are compared at once on a device."""
    return 0 if device.type == "cpu" else BATCH_BYTES


def _size(base: PublishedVersion, name: str) -> int:
    tensor = base.tensor(name)
    return 0 if tensor is None else tensor.numel() or 1 << 62
