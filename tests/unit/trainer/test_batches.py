"""Batches of tensors in which a trainer looks for changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.deltas import random_bits
from tests.unit.trainer.test_delta import Weights, moved, published
from vllm.inflight.delta import Encoder
from vllm.inflight.trainer.deltas import delta as trainer_delta
from vllm.inflight.trainer.deltas import shard_search
from vllm.inflight.trainer.deltas.batches import BatchedSearch
from vllm.inflight.trainer.deltas.delta import Delta, DeltaSearch
from vllm.inflight.trainer.deltas.shard_search import ShardSearch
from vllm.inflight.trainer.sources.shards import Box, OwnShard

SIZE = 6000


def search_all(old: Weights, new: Weights) -> list[str]:
    found = DeltaSearch(published(old), "always").find(new.items())
    assert isinstance(found, Delta)
    return list(found.body.changed)


def search_shards(old: Weights, new: Weights) -> list[str]:
    search = ShardSearch(torch.device("cpu"))
    for tensors in (old, new):
        shards = [
            OwnShard(name, tensor.clone(), Box.of_all((SIZE,)))
            for name, tensor in tensors.items()
        ]
        report = search.find(shards, "always")
        search.keep(shards, report, is_all=report.boxes is not None)
    assert report.changed is not None
    return report.changed


@pytest.mark.parametrize("search", [search_all, search_shards])
def test_a_batch_is_compared_while_the_one_before_is_encoded(
    monkeypatch: pytest.MonkeyPatch, search: Callable[[Weights, Weights], list[str]]
) -> None:
    for module in (trainer_delta, shard_search):
        monkeypatch.setattr(module, "batch_bytes", lambda device: 2 * 2 * SIZE)
    begin, encode = Encoder.search, Encoder.add_found
    events: list[str] = []

    def begun(self: Encoder, pairs: Any) -> Any:
        events.extend(["compare"] * bool(pairs))
        return begin(self, pairs)

    def encoded(self: Encoder, first: int, found: Any) -> Any:
        events.extend(["encode"] * bool(found.pairs))
        return encode(self, first, found)

    monkeypatch.setattr(Encoder, "search", begun)
    monkeypatch.setattr(Encoder, "add_found", encoded)
    old = {f"{n}": random_bits(torch.bfloat16, SIZE, n) for n in range(6)}
    assert search(old, moved(old, ["1", "2", "5"])) == ["1", "2", "5"]
    assert events == ["compare", *["compare", "encode"] * 2, "encode"]


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_a_search_gives_up_when_enough_was_looked_at(policy: str) -> None:
    size = 10 << 20
    search = BatchedSearch[int](policy)
    seen = []
    for number in range(3):
        pair = torch.zeros(size), torch.rand(size)
        search.compare([number], [pair])
        seen.append((search.is_dear, search.is_given_up))
    assert search.finish() == ([2], [2])
    search.close()
    assert len(search.parts) > 1
    is_auto = policy == "auto"
    # Nothing is known before the first batch is finished.
    assert seen == [(is_auto, False), (is_auto, is_auto), (is_auto, is_auto)]
