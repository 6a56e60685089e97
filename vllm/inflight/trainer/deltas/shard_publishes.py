"""Publishes whose changes all ranks of a trainer look for, each in its own shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from vllm.inflight.errors import InflightError
from vllm.inflight.trainer.deltas.policy import DeltaPolicy, Sent
from vllm.inflight.trainer.deltas.ranks import TrainerRanks
from vllm.inflight.trainer.deltas.shard_updates import ShardUpdates
from vllm.inflight.trainer.outcome import Outcome
from vllm.inflight.trainer.sources import stream as sources
from vllm.inflight.trainer.sources.cast import Cast
from vllm.inflight.trainer.sources.shards import OwnShard
from vllm.inflight.update import Manifest, TensorSpec

Send = Callable[[Manifest, Iterable[sources.Pair]], Outcome]
"""Has the engines commit a manifest and its tensors."""


class _Skipped(Exception):
    """An engine was busy, and the publish gave way."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


class ShardPublishes:
    """One object on every rank of the trainer. All of them call `publish`.

    Shards are kept and compared in host memory.

    Args:
        source: the weights.
        rename: from the names of the source to those of the model.
        cast: the dtype that tensors are compared and sent in.
        policy: `auto`, `always` or `off`.
        scrub_every: deltas from one scrub of the kept shards to the next; 0: none.
        chain_length: committed deltas that are kept for engines that missed them.

    Raises:
        ConfigError: there is no group of `torch.distributed`.

    """

    def __init__(
        self,
        source: sources.Source,
        rename: Callable[[str], str],
        cast: Cast,
        policy: str,
        scrub_every: int,
        chain_length: int,
    ) -> None:
        self._source, self._rename, self._cast = source, rename, cast
        self._ranks = TrainerRanks()
        self._updates = ShardUpdates(
            self._ranks,
            DeltaPolicy(policy, "host", None),
            torch.device("cpu"),
            is_pinned=torch.cuda.is_available(),
            scrub_every=scrub_every,
            chain_length=chain_length,
        )

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that sends."""
        return self._ranks.is_first

    @property
    def last(self) -> Sent | None:
        """On rank 0: the last update that was searched for and committed."""
        return self._updates.last

    def publish(
        self, *, is_subset: bool, send: Send, send_plain: Callable[[], Outcome]
    ) -> Outcome:
        """Publish the weights. Collective.

        Args:
            is_subset: whether some of the tensors are to be sent alone.
            send: sends what was found, or all tensors; called on rank 0 alone.
            send_plain: sends without a search; called on rank 0 alone.

        Returns:
            The outcome, on every rank.

        Raises:
            InflightError: what was raised on rank 0, on every rank.
            RuntimeError: on the other ranks, in the place of another error of rank 0.

        """
        if not self.is_first:
            return self._followed(is_subset=is_subset)
        try:
            outcome = self._led(send, send_plain, is_subset=is_subset)
        except BaseException as error:
            self._ranks.told(_portable(error))
            raise
        self._ranks.told(outcome)
        return outcome

    def read_shards(self) -> list[OwnShard]:
        """What this rank has, under the names of the model."""
        found = sources.shards(self._source, self._cast)
        return [replace(shard, name=self._rename(shard.name)) for shard in found]

    def _led(
        self, send: Send, send_plain: Callable[[], Outcome], *, is_subset: bool
    ) -> Outcome:
        """The part of rank 0."""
        if not self._updates.are_wanted(is_subset=is_subset):
            return send_plain()
        outcomes: list[Outcome] = []

        def transfer(manifest: Manifest, pairs: Iterable[sources.Pair]) -> str | None:
            outcome = send(manifest, pairs)
            if outcome.skipped:
                raise _Skipped(outcome)  # so that no rank takes it for served
            outcomes.append(outcome)
            return outcome.digest

        try:
            self._send(transfer)
        except _Skipped as skipped:
            return skipped.outcome
        return outcomes[-1]

    def _followed(self, *, is_subset: bool) -> Outcome:
        """The part of a rank that does not send."""
        failure: Exception | None = None
        try:
            if self._updates.are_wanted(is_subset=is_subset):
                self._send(_nothing)
            else:
                sources.take_part(self._source)
        except Exception as error:
            failure = error
        found: Outcome | BaseException = self._ranks.told()
        if isinstance(found, BaseException):
            raise found from failure
        if failure is not None:
            raise failure
        return found

    def _send(
        self, transfer: Callable[[Manifest, Iterable[sources.Pair]], str | None]
    ) -> None:
        facts = [
            TensorSpec(
                self._rename(name), fact.shape, str(fact.dtype).removeprefix("torch.")
            )
            for name, fact in sources.facts(self._source, self._cast)
        ]
        self._updates.send(self, facts, self._gathered, transfer)

    def _gathered(self) -> Iterable[sources.Pair]:
        pairs = sources.tensors(self._source, self._cast)
        return ((self._rename(name), tensor) for name, tensor in pairs)


def _nothing(manifest: Manifest, pairs: Iterable[sources.Pair]) -> None:
    """In the place of a transfer, on ranks that do not send."""


def _portable(error: BaseException) -> BaseException:
    """The error, or one with its text if it is none of ours and may not be copied."""
    if isinstance(error, InflightError):
        return error
    return RuntimeError(f"rank 0 of the trainer: {error!r}")
