"""The delta of one update, found by all ranks of a trainer, each in its own shards.

Each rank answers for some of its shards, and keeps those of the last version. It
compares them with those of now, and digests those that have changed. Rank 0 adds the
digests up, and puts the changes of all ranks together. Numbers of elements are those in
the whole tensor then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

import torch

from vllm.inflight.delta.decode import decode
from vllm.inflight.delta.decoded import Changes
from vllm.inflight.delta.encode import Encoder
from vllm.inflight.delta.part import Part
from vllm.inflight.errors import ConfigError, DeltaUnsupported
from vllm.inflight.ops import Digest
from vllm.inflight.trainer.deltas.batches import (
    LOOKED_AT_BYTES,
    WHOLE_FROM,
    BatchedSearch,
    batch_bytes,
)
from vllm.inflight.trainer.deltas.chain import KEPT_DELTAS, union
from vllm.inflight.trainer.deltas.delta import DeltaBody
from vllm.inflight.trainer.deltas.published import SCRUB_EVERY, KeptScrubs, note_damage
from vllm.inflight.trainer.sources.shards import Box, OwnShard, shard_digests
from vllm.inflight.update import TensorSpec

MOST_SAMPLED = 1024
"""Most shards of a rank that a sample has a piece of."""
SAMPLED_SHARE = 16
"""A sample has one element in so many of these shards."""
LEAST_SAMPLED = 4096
"""Fewest elements of a piece, if the shard has as many."""

Sizes = list[tuple[int, int]]
"""Bytes of the table and of the data of each part."""
Boxes = dict[str, tuple[torch.dtype, Box]]
"""Name → dtype and place of a rank's shard."""


@dataclass
class ShardReport:
    """What a rank tells rank 0 of its shards, before anything is sent."""

    boxes: Boxes | None = None
    """All shards that it has; None: they are those of the last version."""
    digests: dict[str, Digest] = field(default_factory=dict)
    """Of the shards that have changed, or of all."""
    changed: list[str] | None = None
    """The shards of the delta, by their number in its parts; None: there is no delta,
    since there is no version to start from, or since a whole version is cheaper."""
    part_sizes: Sizes = field(default_factory=list)
    """Of the parts."""


class ShardSearch:
    """The shards that a rank keeps of the last version, and the search in them.

    Args:
        device: where they are kept and compared.
        is_pinned: whether they are kept in page-locked memory.
        scrub_every: deltas from one scrub of the kept shards to the next; 0: none.
        chain_length: committed deltas that are kept for engines that missed them.

    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_pinned: bool = False,
        scrub_every: int = SCRUB_EVERY,
        chain_length: int = KEPT_DELTAS,
    ) -> None:
        self._device, self._is_pinned = device, is_pinned
        self._scrubs = KeptScrubs(scrub_every)
        self._digests: dict[str, Digest] = {}
        """Of the kept shards."""
        self._kept: dict[str, torch.Tensor] = {}
        self._boxes: Boxes | None = None
        """Of all shards of the last version; None: what is kept is no version that is
        served."""
        self._left: frozenset[str] = frozenset()
        """Shards that another rank answers for, which has the same."""
        self.parts: list[Part] = []
        """The parts of the last search; their values are differences."""
        self._sent: deque[DeltaBody] = deque(maxlen=chain_length)
        """What this rank has found for the deltas that were committed last."""

    def sample(self, shards: Sequence[OwnShard]) -> tuple[float, int]:
        """Look for changes in a piece of many shards, from the first to the last.

        One layer may change much more than the others, so each has its part in it.

        Args:
            shards: all that this rank has.

        Returns:
            about how many bytes the changes take, and the bytes of the shards that this
            rank answers for. Both are 0 if a search costs hardly more, or if there is
            no version to start from.

        """
        own = [one for one in shards if one.name not in self._left]
        num_bytes = sum(one.tensor.nbytes for one in own)
        if num_bytes < LOOKED_AT_BYTES or _boxes_of(shards) != self._boxes:
            return 0.0, 0
        pairs = []
        for number, one in enumerate(own[:: -(-len(own) // MOST_SAMPLED)]):
            num = one.tensor.numel()
            size = min(num, max(LEAST_SAMPLED, num // SAMPLED_SHARE))
            start = (num - size) * (number * 7 % SAMPLED_SHARE) // (SAMPLED_SHARE - 1)
            piece = slice(start, start + size)
            now = replace(one, tensor=one.tensor.reshape(-1)[piece])
            pairs.append((self._kept[one.name].view(-1)[piece], self._here(now)))
        search = BatchedSearch[None]("always", values="difference")
        search.compare([None] * len(pairs), pairs)
        search.finish()
        search.close()
        sampled = sum(now.nbytes for _, now in pairs)
        # A piece needs a row of a part's table, as a shard does; there are more pieces
        # for their bytes.
        found = sum(part.data.numel() for part in search.parts)
        return found / sampled * num_bytes, num_bytes

    def find(
        self, shards: Sequence[OwnShard], *, is_given_up: bool = False
    ) -> ShardReport:
        """Compare shards with the kept ones.

        Args:
            shards: all that this rank has.
            is_given_up: whether a whole version will be sent in any case.

        """
        self.parts = []
        boxes = _boxes_of(shards)
        if boxes != self._boxes:
            return ShardReport(boxes, shard_digests(shards))
        own = [one for one in shards if one.name not in self._left]
        if is_given_up:
            return ShardReport(digests=shard_digests(own))
        # Differences, since rank 0 has no old bits to go with other ones.
        search = BatchedSearch[OwnShard]("always", values="difference")
        changed = list[OwnShard]()
        # The empty batch finishes the last one.
        for batch in (*_batches(own, batch_bytes(self._device)), []):
            pairs = [(self._kept[one.name], self._here(one)) for one in batch]
            _, some = search.compare(batch, pairs)
            changed += some
        search.close()
        self.parts = search.parts
        return ShardReport(
            # Of the shards themselves, and not worked out from the kept ones.
            digests=shard_digests(changed),
            changed=[one.name for one in changed],
            part_sizes=sizes_of(self.parts),
        )

    def since(
        self, shards: Sequence[OwnShard], report: ShardReport, number: int
    ) -> DeltaBody:
        """What has changed in the last `number` committed deltas and the one found now.

        Its values are bits, and no differences.

        Args:
            shards: as in `find`.
            report: what `find` has returned.
            number: of committed deltas.

        Raises:
            DeltaUnsupported: so many are not kept.

        """
        if number > len(self._sent):
            raise DeltaUnsupported(f"{number} deltas are not kept on each rank")
        bodies = [*list(self._sent)[-number:], self._body(shards, report)]
        own = [
            one for one in shards if any(one.name in body.changed for body in bodies)
        ]
        changed = {one.name: _spec(one) for one in own}
        found = union(bodies, changed, ((one.name, self._here(one)) for one in own))
        assert found is not None
        return found

    def _body(self, shards: Sequence[OwnShard], report: ShardReport) -> DeltaBody:
        """What the last search has found."""
        of = {one.name: one for one in shards}
        own = [of[name] for name in report.changed or ()]
        counts = [one.box.numel for one in own]
        for part in self.parts:
            part.check(counts, [one.tensor.element_size() for one in own])
        return DeltaBody(list(self.parts), {one.name: _spec(one) for one in own})

    def leave(self, names: Iterable[str]) -> None:
        """Another rank answers for these of the shards that were reported."""
        self._left = frozenset(names)

    def keep(
        self, shards: Sequence[OwnShard], report: ShardReport, *, is_all: bool
    ) -> None:
        """These shards are served now.

        Args:
            shards: as in `find`.
            report: what `find` has returned.
            is_all: whether a whole version was sent. Then all of them are copied.

        """
        if is_all:
            self._sent.clear()
        else:
            self._sent.append(self._body(shards, report))
            most = WHOLE_FROM * sum(kept.nbytes for kept in self._kept.values())
            while sum(one.num_bytes for one in self._sent) > most:
                self._sent.popleft()
        before = {} if report.boxes is not None else self._kept
        changed = None if is_all else set(report.changed or ())
        self._boxes = None
        kept: dict[str, torch.Tensor] = {}
        for one in shards:
            if one.name in self._left:
                continue
            old = before.get(one.name)
            if old is None:
                old = torch.empty(
                    one.tensor.shape,
                    dtype=one.tensor.dtype,
                    device=self._device,
                    pin_memory=self._is_pinned,
                )
                old.copy_(one.tensor)
            elif changed is None or one.name in changed:
                old.copy_(one.tensor)
            kept[one.name] = old
        self._kept, self.parts = kept, []
        self._digests |= report.digests
        if self._scrubs.is_due(is_delta=not is_all) and (
            names := self._damaged(shards)
        ):
            note_damage(names)
            return
        self._boxes = _boxes_of(shards)

    def _damaged(self, shards: Iterable[OwnShard]) -> list[str]:
        """Names of kept shards whose content is no longer that of their digest."""
        kept = (
            replace(one, tensor=self._kept[one.name])
            for one in shards
            if one.name in self._kept
        )
        found = shard_digests(kept)
        return [name for name, each in found.items() if each != self._digests[name]]

    def forget(self) -> None:
        """Start from no version: another one than the kept one may be served."""
        self._boxes, self.parts = None, []
        self._sent.clear()

    def _here(self, shard: OwnShard) -> torch.Tensor:
        return shard.tensor.to(self._device).contiguous().resolve_neg()


def _boxes_of(shards: Iterable[OwnShard]) -> Boxes:
    return {one.name: (one.tensor.dtype, one.box) for one in shards}


class ShardedVersion:
    """A version as rank 0 knows it: where its shards are, and their digests.

    Args:
        facts: name, shape and dtype of every tensor.
        boxes: of each rank, the shards that it answers for.
        digests: of each rank, those of its shards; others may be there, too.

    """

    def __init__(
        self,
        facts: Sequence[TensorSpec],
        boxes: Sequence[Boxes],
        digests: Sequence[Mapping[str, Digest]],
    ) -> None:
        self._boxes, self._digests = boxes, digests
        self.specs = {
            spec.name: TensorSpec(
                spec.name, spec.shape, spec.dtype, self._digest(spec.name).hex()
            )
            for spec in facts
        }
        """Every tensor with its digest."""

    @classmethod
    def after(
        cls,
        last: ShardedVersion | None,
        reports: Sequence[ShardReport],
        facts: Sequence[TensorSpec],
    ) -> ShardedVersion:
        """The version that the ranks report.

        Args:
            last: the version that they reported before.
            reports: of all ranks, in order.
            facts: name, shape and dtype of every tensor.

        Raises:
            ConfigError: the shards of a tensor do not make it up, or two ranks have
                different ones in one place.

        """
        boxes: list[Boxes] = []
        digests: list[Mapping[str, Digest]] = []
        for rank, report in enumerate(reports):
            known = {} if last is None else last._digests[rank]
            was = {} if last is None else last._boxes[rank]
            boxes.append({} if report.boxes is not None else was)
            digests.append({**({} if report.boxes else known), **report.digests})
        found = cls(facts, _shared_out(boxes, reports, digests), digests)
        if any(report.boxes is not None for report in reports):
            found._check()
        return found

    def left(self, reports: Sequence[ShardReport]) -> list[list[str]]:
        """Of each rank, the reported shards that another rank answers for."""
        return [
            [name for name in report.boxes or () if name not in self._boxes[rank]]
            for rank, report in enumerate(reports)
        ]

    def _digest(self, name: str) -> Digest:
        shares = (
            digests[name]
            for boxes, digests in zip(self._boxes, self._digests, strict=True)
            if name in boxes
        )
        return sum(shares, start=Digest.ZERO)

    def _check(self) -> None:
        """Raise if shards are missing, or overlap."""
        for spec in self.specs.values():
            held = [rank[spec.name] for rank in self._boxes if spec.name in rank]
            boxes = [box for _, box in held]
            kinds = {(_dtype_name(dtype), box.shape) for dtype, box in held}
            is_whole = sum(box.numel for box in boxes) == prod(spec.shape)
            overlap = any(one.meets(other) for one, other in combinations(boxes, 2))
            if overlap or not is_whole or kinds - {(spec.dtype, tuple(spec.shape))}:
                raise ConfigError(
                    f"the shards of {spec.name!r} that the ranks have do not make up a "
                    f"tensor of {list(spec.shape)} in {spec.dtype}: {boxes}"
                )

    def merged(
        self,
        names: Sequence[str],
        changed: Sequence[Sequence[str]],
        parts: Sequence[Sequence[Part]],
        *,
        are_bits: bool = False,
    ) -> Iterator[Part]:
        """The parts of one delta with the changes of all ranks.

        Args:
            names: the changed tensors, in the order of their numbers.
            changed: of each rank, the tensors by the numbers in its own parts.
            parts: of each rank.
            are_bits: whether their values are bits, and no differences.

        """
        found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for rank, own in enumerate(parts):
            for name, changes in self._decoded(rank, changed[rank], own):
                places = self._boxes[rank][name][1].places(changes.places)
                found.setdefault(name, []).append((places, changes.bits))
        encoder = Encoder(values="raw" if are_bits else "difference")
        for number, name in enumerate(names):
            places, bits = (
                torch.cat(some) for some in zip(*found.pop(name), strict=True)
            )
            places, order = places.sort()
            bits = bits[order]
            # As differences from zero they are what they are.
            yield from encoder.add_places(number, places, torch.zeros_like(bits), bits)
        yield from encoder.finish()

    def _decoded(
        self, rank: int, changed: Sequence[str], parts: Iterable[Part]
    ) -> Iterator[tuple[str, Changes]]:
        boxes = [self._boxes[rank][name] for name in changed]
        counts = [box.numel for _, box in boxes]
        widths = [dtype.itemsize for dtype, _ in boxes]
        for part in parts:
            part.check(counts, widths)
            for changes in decode(part):
                yield changed[changes.number], changes


def _shared_out(
    boxes: Sequence[Boxes],
    reports: Sequence[ShardReport],
    digests: Sequence[Mapping[str, Digest]],
) -> list[Boxes]:
    """The shards that each rank answers for: of equal ones, the rank with the least.

    Args:
        boxes: of each rank, those that it has answered for so far.
        reports: of each rank.
        digests: of each rank.

    """
    owners: dict[tuple[str, Box], int] = {}
    loads = [0] * len(boxes)
    for rank, own in enumerate(boxes):
        for name, (dtype, box) in own.items():
            owners[name, box] = rank
            loads[rank] += box.numel * dtype.itemsize
    found = [dict(own) for own in boxes]
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, report in enumerate(reports):
        for name, (_, box) in (report.boxes or {}).items():
            holders.setdefault((name, box), []).append(rank)
    for (name, box), ranks in holders.items():
        owner = owners.get((name, box))
        if owner is None:
            owner = min(ranks, key=lambda rank: (loads[rank], rank))
            dtype = (reports[owner].boxes or {})[name][0]
            found[owner][name] = dtype, box
            loads[owner] += box.numel * dtype.itemsize
        others = [rank for rank in ranks if digests[rank][name] != digests[owner][name]]
        if others:
            raise ConfigError(
                f"ranks {sorted([owner, *others])} of the trainer have different "
                f"values in the same place of {name!r}"
            )
    return found


def no_change(specs: Mapping[str, TensorSpec], device: torch.device) -> list[Part]:
    """The parts of a delta in which one element becomes what it is.

    A delta names a tensor at least: this one is the smallest, under number 0.
    """
    spec = smallest(specs)
    zeros = torch.zeros(1, dtype=getattr(torch, spec.dtype), device=device)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    encoder = Encoder(values="difference")
    return [*encoder.add_places(0, place, zeros, zeros), *encoder.finish()]


def smallest(specs: Mapping[str, TensorSpec]) -> TensorSpec:
    """The tensor with the fewest elements, but one at least."""
    return min(specs.values(), key=lambda spec: prod(spec.shape) or 1 << 62)


def sizes_of(parts: Iterable[Part]) -> Sizes:
    """The sizes of these parts."""
    return [(part.table.numel(), part.data.numel()) for part in parts]


def _spec(shard: OwnShard) -> TensorSpec:
    """What a part of this rank has to fit."""
    tensor = shard.tensor
    return TensorSpec(shard.name, tuple(tensor.shape), _dtype_name(tensor.dtype))


def _batches(shards: Sequence[OwnShard], most: int) -> Iterator[list[OwnShard]]:
    """Shards in order, in lists of about so many bytes, or of one shard."""
    batch: list[OwnShard] = []
    num_bytes = 0
    for shard in shards:
        batch.append(shard)
        num_bytes += shard.tensor.nbytes
        if num_bytes >= most:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
