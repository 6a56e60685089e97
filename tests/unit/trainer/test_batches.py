"""Batches of tensors in which a trainer looks for changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.deltas import random_bits, scattered, with_changes
from tests.unit.trainer.test_delta import Weights, moved, published
from vllm.inflight.delta import Encoder
from vllm.inflight.trainer.deltas import batches, delta, shard_search
from vllm.inflight.trainer.deltas.batches import BatchedSearch
from vllm.inflight.trainer.deltas.delta import Delta, DeltaSearch, layer_of
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
        report = search.find(shards)
        search.keep(shards, report, is_all=report.boxes is not None)
    assert report.changed is not None
    return report.changed


@pytest.mark.parametrize("search", [search_all, search_shards])
def test_a_batch_is_compared_while_the_one_before_is_encoded(
    monkeypatch: pytest.MonkeyPatch, search: Callable[[Weights, Weights], list[str]]
) -> None:
    for module in (delta, shard_search):
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


NUM_LAYERS, LAYER = 36, 1 << 20
"""Layers of a model, and elements of each."""


def looked_at(shares: Any, policy: str = "auto", whole_from: float = 0.06) -> Any:
    """A search in layers of which these shares have changed, up to where it gives up,
    and the number of layers that it has compared."""
    num_bytes = NUM_LAYERS * LAYER * 2
    search = BatchedSearch[int](policy, whole_from=whole_from, num_bytes=num_bytes)
    old = random_bits(torch.bfloat16, LAYER)
    for number, share in enumerate(shares):
        pair = old, with_changes(old, scattered(LAYER, share))
        search.compare([number], [pair], str(number))
        search.finish()
        if search.is_given_up:
            return search, number + 1
    search.close()
    return search, NUM_LAYERS


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model may be given up as soon as a large one."""
    monkeypatch.setattr(batches, "LOOKED_AT_BYTES", 0)


@pytest.mark.parametrize("hot", [0, 1, 2, 3, 17, 35])
def test_one_layer_that_changes_much_ends_no_search(looks_soon: None, hot: int) -> None:
    shares = [0.6 if number == hot else 0.005 for number in range(NUM_LAYERS)]
    search, num_compared = looked_at(shares)
    assert num_compared == NUM_LAYERS and not search.is_dear


@pytest.mark.parametrize("cold", [0, 1])
def test_one_layer_that_changes_little_keeps_no_search_going(
    looks_soon: None, cold: int
) -> None:
    shares = [0.001 if number == cold else 0.1 for number in range(NUM_LAYERS)]
    assert looked_at(shares)[1] == 4


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.11.mlp.experts.3.up_proj.weight", "model.layers.11"),
        ("visual.blocks.0.norm1.weight", "visual.blocks.0"),
        ("0.weight", "0"),
        ("h.7", "h.7"),
        ("model.embed_tokens.weight", None),
        ("conv1.weight", None),
    ],
)
def test_a_name_tells_the_layer(name: str, layer: str | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize("share", [0.05, 0.1, 0.6, 1.0])
def test_a_search_is_given_up_soon_where_all_layers_change_much(
    looks_soon: None, share: float
) -> None:
    _, num_compared = looked_at([share] * NUM_LAYERS)
    assert num_compared == 2
    assert looked_at([share] * NUM_LAYERS, "always")[1] == NUM_LAYERS


def test_a_search_is_given_up_once_the_whole_version_is_cheaper_in_any_case() -> None:
    """The layers that change are the last ones."""
    shares = [0.0001] * 24 + [0.9] * 12
    search, num_compared = looked_at(shares)
    assert 24 < num_compared < 32
    assert search.parts is not None


def test_little_is_compared_before_a_search_is_given_up() -> None:
    _, num_compared = looked_at([0.1] * NUM_LAYERS)
    assert num_compared * LAYER * 2 >= batches.LOOKED_AT_BYTES
    _, num_compared = looked_at([0.1] * NUM_LAYERS, whole_from=0.25)
    assert num_compared == NUM_LAYERS
