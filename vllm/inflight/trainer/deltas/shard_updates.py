"""Updates of a trainer engine as deltas that all ranks of the trainer look for.

Every rank keeps and compares its own shards, and only changes travel to rank 0, which
sends. All ranks call `send` for each update. Rank 0 tells the others how it goes on,
and whether the engines have committed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from math import prod
from typing import Any, Protocol

import torch

from vllm.inflight.delta.part import Part
from vllm.inflight.delta.parts import named
from vllm.inflight.errors import BaseMismatch, ConfigError
from vllm.inflight.trainer.deltas.batches import WHOLE_FROM, require_share
from vllm.inflight.trainer.deltas.chain import KEPT_DELTAS
from vllm.inflight.trainer.deltas.delta import OF_A_DELTA, DeltaBody
from vllm.inflight.trainer.deltas.policy import DeltaPolicy, Sent
from vllm.inflight.trainer.deltas.published import SCRUB_EVERY, version_digest
from vllm.inflight.trainer.deltas.ranks import TrainerRanks
from vllm.inflight.trainer.deltas.shard_search import (
    ShardedVersion,
    ShardReport,
    ShardSearch,
    Sizes,
    no_change,
    sizes_of,
    smallest,
)
from vllm.inflight.trainer.sources.shards import OwnShard
from vllm.inflight.trainer.sources.stream import Pair, gathering
from vllm.inflight.update import Manifest, TensorSpec

logger = logging.getLogger(__name__)

Transfer = Callable[[Manifest, Iterable[Pair]], str | None]
"""Has the engines commit one update: its manifest, and the tensors to send. Returns the
digest of what they serve then, if they told it."""


class Way(Enum):
    """What rank 0 tells the others."""

    SEARCH = "search"
    """Look for changes."""
    SAMPLE = "sample"
    """Look for changes, unless a sample shows that a whole version is cheaper."""
    PLAIN = "plain"
    """This update has no manifest, so no delta may start from it."""
    DELTA = "delta"
    """Send the changes to rank 0."""
    LONGER = "longer"
    """Look for what has changed since an older version, which the engines serve."""
    WHOLE = "whole"
    """Gather all tensors."""
    COMMITTED = "committed"
    FAILED = "failed"


class ShardSource(Protocol):
    """A source whose ranks can be asked for their own shards; see `Weights`."""

    def read_shards(self) -> list[OwnShard]:
        """What this rank answers for, without gathering."""
        ...


class ShardUpdates:
    """Sends versions, as deltas where it can; one object on every rank.

    Args:
        ranks: of the trainer.
        policy: whether deltas are sent; that of rank 0 counts.
        device: where shards are kept and compared.
        is_pinned: whether they are kept in page-locked memory.
        scrub_every: deltas from one scrub of the kept shards to the next; 0: none.
        chain_length: committed deltas that are kept for engines that missed them.
        whole_from: share of a version's bytes from which `auto` sends it whole.

    """

    def __init__(
        self,
        ranks: TrainerRanks,
        policy: DeltaPolicy,
        device: torch.device,
        *,
        is_pinned: bool,
        scrub_every: int = SCRUB_EVERY,
        chain_length: int = KEPT_DELTAS,
        whole_from: float = WHOLE_FROM,
    ) -> None:
        require_share(whole_from)
        self._whole_from = whole_from
        self._ranks = ranks
        self._policy = policy
        self._device = device
        self._search = ShardSearch(
            device,
            is_pinned=is_pinned,
            scrub_every=scrub_every,
            chain_length=chain_length,
        )
        self._is_sampled = False
        """Whether the ranks look at a sample of this update first."""
        self._bases: deque[str] = deque(maxlen=chain_length)
        """On rank 0: what each of the deltas that were committed last started from."""
        self.last: Sent | None = None
        """On rank 0: the last update that was committed with a manifest."""
        self._version: ShardedVersion | None = None
        self._num_longer = 0
        """On rank 0: bytes that other ranks have brought for a longer delta."""
        self._base: str | None = None
        """The digest of the version that the ranks keep, if it is served."""

    @property
    def policy(self) -> str:
        """`auto`, `always` or `off`; may be changed on rank 0 between two updates."""
        return self._policy.name

    @policy.setter
    def policy(self, name: str) -> None:
        self._policy.name = name

    def are_wanted(self, *, is_subset: bool) -> bool:
        """Whether the next update goes through here. Collective.

        Args:
            is_subset: whether it has some of the parameters alone. They are no version,
                so no delta starts from them.

        """
        wants = self.policy != "off" and not is_subset
        search = Way.SAMPLE if self.policy == "auto" else Way.SEARCH
        way = self._ranks.told(search if wants else Way.PLAIN)
        self._is_sampled = way is Way.SAMPLE
        if way is Way.PLAIN:
            self._forget()
            return False
        return True

    def send(
        self,
        source: ShardSource,
        facts: Sequence[TensorSpec],
        gather: Callable[[], Iterable[Pair]],
        transfer: Transfer,
    ) -> None:
        """Run one update: a delta, or the whole version. Collective.

        Args:
            source: the weights.
            facts: name, shape and dtype of every tensor.
            gather: reads all tensors, whole. Collective.
            transfer: runs one update; on rank 0 alone.

        Raises:
            ConfigError: the source has no shards, or they do not make up its tensors.
                All ranks raise it.
            InflightError: on rank 0, what an engine refused. It serves what it served.

        """
        began = time.perf_counter()
        shards, report = self._found(source)
        if self._ranks.is_first:
            self._lead(shards, report, facts, gather, transfer, began)
        else:
            self._follow(shards, report, gather)

    def _found(self, source: ShardSource) -> tuple[list[OwnShard], ShardReport | str]:
        """The shards of this rank and what was found, or why there is nothing."""
        shards: list[OwnShard] = []
        sampled = 0.0, 0
        why: str | None = None
        try:
            if not hasattr(source, "read_shards"):
                raise ConfigError(
                    f"{type(source).__name__} has no read_shards; with delta_shards "
                    "the source is a Weights of this package, or has that method"
                )
            shards = source.read_shards()
            if self._is_sampled:
                sampled = self._search.sample(shards)
        except Exception as error:
            logger.exception("this rank could not look for changes")
            why = str(error)
        # The other ranks wait for this one, also if it has failed.
        is_given_up = self._is_sampled and self._is_dear(sampled)
        if why is not None:
            return [], why
        try:
            return shards, self._search.find(shards, is_given_up=is_given_up)
        except Exception as error:
            logger.exception("this rank could not look for changes")
            return [], str(error)

    def _is_dear(self, sampled: tuple[float, int]) -> bool:
        """Whether the samples of all ranks show that a whole version is cheaper.

        One rank may have the layers that change most, so no rank decides for itself.
        Collective.
        """
        told = self._ranks.gathered(sampled) or ()
        found = sum(estimate for estimate, _ in told)
        num_bytes = sum(size for _, size in told)
        is_dear: bool = self._ranks.told(0 < self._whole_from * num_bytes <= found)
        return is_dear

    def _follow(
        self,
        shards: Sequence[OwnShard],
        report: ShardReport | str,
        gather: Callable[[], Iterable[Pair]],
    ) -> None:
        """The part of a rank that does not send."""
        self._ranks.gathered(report)
        way, why, left = self._ranks.told()
        if way is Way.FAILED:
            self._forget()
            raise ConfigError(why)
        assert isinstance(report, ShardReport)
        if report.boxes is not None:
            self._search.leave(left[self._ranks.number])
        is_delta = way is Way.DELTA
        if is_delta:
            self._ranks.gathered_parts(self._search.parts, (), self._device)
            way = self._ranks.told()
        if way is Way.LONGER:
            body, _ = self._longer(shards, report, self._ranks.told())
            if self._ranks.told():
                assert isinstance(body, DeltaBody)
                self._ranks.gathered_parts(body.parts, (), self._device)
            way = self._ranks.told()
        if way is Way.WHOLE:
            is_delta = False
            for _ in gather():
                pass
            way = self._ranks.told()
        self._settle(way, shards, report, is_delta=is_delta)

    def _lead(
        self,
        shards: Sequence[OwnShard],
        report: ShardReport | str,
        facts: Sequence[TensorSpec],
        gather: Callable[[], Iterable[Pair]],
        transfer: Transfer,
        began: float,
    ) -> None:
        """The part of rank 0."""
        reports = self._ranks.gathered(report)
        assert reports is not None
        try:
            found = _sound(reports)
            version = ShardedVersion.after(self._version, found, facts)
        except Exception as error:
            self._ranks.told((Way.FAILED, str(error), ()))
            self._forget()
            raise
        left = version.left(found)
        if found[0].boxes is not None:
            self._search.leave(left[0])
        is_delta, num_gathered, self._num_longer = False, 0, 0
        is_tried = self._is_cheap(found, version)
        self._ranks.told((Way.DELTA if is_tried else Way.WHOLE, "", left))
        if is_tried:
            sizes = [one.part_sizes for one in found]
            parts = self._ranks.gathered_parts(self._search.parts, sizes, self._device)
            num_gathered = sum(sum(pair) for some in sizes[1:] for pair in some)
            with self._telling_failure():
                manifest, pairs = self._delta(version, found, parts)
                search_s = time.perf_counter() - began
                older = partial(self._older, shards, found[0], version)
                is_delta, served, pairs = self._was_sent(
                    manifest, pairs, transfer, older
                )
            num_bytes = sum(tensor.nbytes for _, tensor in pairs)
            num_gathered += self._num_longer
        if not is_delta:
            self._base = None
            if is_tried:
                self._ranks.told(Way.WHOLE)
            search_s = time.perf_counter() - began
            with self._telling_failure(), gathering(gather()) as gathered:
                served = transfer(Manifest(version.specs), gathered)
            num_bytes = sum(map(_num_bytes, version.specs.values()))
        self.last = Sent(is_delta, num_bytes, search_s, num_gathered)
        digest = version_digest(version.specs)
        if is_delta and self._base is not None:
            self._bases.append(self._base)
        else:
            self._bases.clear()
        # Where an engine digests other tensors than were sent, no delta has its base.
        self._base = digest if served in (None, digest) else None
        self._version = version
        self._ranks.told(Way.COMMITTED)
        self._settle(Way.COMMITTED, shards, found[0], is_delta=is_delta)

    def _settle(
        self,
        way: Way,
        shards: Sequence[OwnShard],
        report: ShardReport,
        *,
        is_delta: bool,
    ) -> None:
        """Keep what is served now. After a delta that failed, that is what it was."""
        if way is Way.COMMITTED:
            self._search.keep(shards, report, is_all=not is_delta)
        elif not is_delta:
            self._search.forget()

    def _is_cheap(
        self, reports: Sequence[ShardReport], version: ShardedVersion
    ) -> bool:
        """Whether there is a delta, and it is to be sent."""
        if self._base is None or any(one.changed is None for one in reports):
            return False
        return self._fits((one.part_sizes for one in reports), version)

    def _fits(self, sizes: Iterable[Sizes], version: ShardedVersion) -> bool:
        """Whether parts of these sizes, of each rank, are cheaper than all tensors."""
        num_bytes = sum(sum(pair) for some in sizes for pair in some)
        whole = sum(map(_num_bytes, version.specs.values()))
        return self.policy != "auto" or num_bytes < self._whole_from * whole

    def _longer(
        self, shards: Sequence[OwnShard], report: ShardReport, number: int
    ) -> tuple[DeltaBody | None, list[Any] | None]:
        """What this rank has to send to engines that are `number` deltas behind.

        On rank 0 also the tensors and sizes of each rank, or why it has nothing.
        Collective.
        """
        body: DeltaBody | None = None
        told: tuple[list[str], Sizes] | str
        try:
            body = self._search.since(shards, report, number)
            told = list(body.changed), sizes_of(body.parts)
        except Exception as error:
            told = str(error)
        return body, self._ranks.gathered(told)

    def _older(
        self,
        shards: Sequence[OwnShard],
        report: ShardReport,
        version: ShardedVersion,
        served: str,
    ) -> tuple[Manifest, list[Pair]] | None:
        """On rank 0: the delta from an older version; None if there is none to send."""
        behind = {base: n for n, base in enumerate(reversed(self._bases), 1)}
        if served not in behind:
            return None
        self._ranks.told(Way.LONGER)
        body, told = self._longer(shards, report, self._ranks.told(behind[served]))
        assert told is not None
        fits = all(not isinstance(one, str) for one in told) and self._fits(
            (sizes for _, sizes in told), version
        )
        self._ranks.told(fits)
        if not fits:
            return None
        assert body is not None
        sizes = [sizes for _, sizes in told]
        self._num_longer = sum(sum(pair) for some in sizes[1:] for pair in some)
        parts = self._ranks.gathered_parts(body.parts, sizes, self._device)
        changed = [names for names, _ in told]
        return self._announced(version, changed, parts, served, are_bits=True)

    def _delta(
        self,
        version: ShardedVersion,
        reports: Sequence[ShardReport],
        parts: Sequence[Sequence[Part]],
    ) -> tuple[Manifest, list[Pair]]:
        """The manifest and the tensors of the delta that was found."""
        changed = [one.changed or [] for one in reports]
        return self._announced(version, changed, parts, self._base)

    def _announced(
        self,
        version: ShardedVersion,
        changed: Sequence[Sequence[str]],
        parts: Sequence[Sequence[Part]],
        base: str | None,
        *,
        are_bits: bool = False,
    ) -> tuple[Manifest, list[Pair]]:
        """The manifest and the tensors of a delta, from the parts of each rank."""
        some = {name for names in changed for name in names}
        names = [name for name in version.specs if name in some]
        if names:
            made = list(version.merged(names, changed, parts, are_bits=are_bits))
        else:
            names = [smallest(version.specs).name]
            made = no_change(version.specs, self._device)
        specs = {name: version.specs[name] for name in names}
        return Manifest(specs, base=base), list(named(made))

    def _was_sent(
        self,
        manifest: Manifest,
        pairs: list[Pair],
        transfer: Transfer,
        older: Callable[[str], tuple[Manifest, list[Pair]] | None],
    ) -> tuple[bool, str | None, list[Pair]]:
        """Send a delta, from an older version if that is what the engines serve.

        Returns False if the version has to be sent whole, the digest of what is served
        then, and what was sent.
        """
        try:
            try:
                served = transfer(manifest, pairs)
            except BaseMismatch as error:
                found = None if error.served is None else older(error.served)
                if found is None:
                    raise
                logger.info("a delta from an older version is sent: %s", error)
                manifest, pairs = found
                served = transfer(manifest, pairs)
        except OF_A_DELTA as error:
            self._policy.note_rejected(error)
            return False, None, pairs
        self._policy.note_committed()
        return True, served, pairs

    @contextmanager
    def _telling_failure(self) -> Iterator[None]:
        """Tell the other ranks if the body fails, or they would wait."""
        try:
            yield
        except BaseException:
            self._ranks.told(Way.FAILED)
            self._settle(Way.FAILED, (), ShardReport(), is_delta=self._base is not None)
            raise

    def _forget(self) -> None:
        self._base = self._version = None
        self._bases.clear()
        self._search.forget()


def _sound(reports: Iterable[ShardReport | str]) -> list[ShardReport]:
    """The reports, if every rank has one.

    Raises:
        ConfigError: a rank has none; the message says why.

    """
    found = []
    for rank, report in enumerate(reports):
        if isinstance(report, str):
            raise ConfigError(f"rank {rank} of the trainer: {report}")
        found.append(report)
    return found


def _num_bytes(spec: TensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return prod(spec.shape) * dtype.itemsize
