"""A publisher whose ranks look for changes in their own shards: what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.trainers.fake_engine import StandIn, publisher
from vllm.inflight.errors import ConfigError


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A trainer's group of this process alone."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"name_map": "auto"}, "name_map='auto'"),
        ({"delta_file": "kept"}, "delta_file"),
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_what_shards_exclude_is_named(
    engine: StandIn, options: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{named} and delta_shards exclude"):
        publisher(engine, delta_shards=True, **options)


@pytest.mark.usefixtures("one_rank")
def test_ranks_that_publish_together_wait_for_the_commit(engine: StandIn) -> None:
    with publisher(engine, delta_shards=True) as to:
        with pytest.raises(ConfigError, match="block=False"):
            to.publish(block=False)
        with pytest.raises(ConfigError, match=r"asyncio\.to_thread"):
            asyncio.run(to.apublish())
    assert engine.calls == []


def test_shards_need_the_group_of_the_trainers_ranks(engine: StandIn) -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        publisher(engine, delta_shards=True)
