"""KV that a connector keeps under the engine's block hashes, across commits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.engine.bare_core import Streams, add, call, prompt
from tests.simulated.core import publish_weights, simulated_core
from tests.simulated.load import ask
from tests.simulated.tiered import Tiered, offloading

pytestmark = pytest.mark.engine

TEXT = prompt(1, 90)
NUM_BLOCKS = 16
"""Of the GPU's cache: for one request and a half."""


@pytest.fixture
def core(model: Path) -> Iterator[EngineCore]:
    core = simulated_core(
        model,
        Tiered,
        kv_transfer_config=offloading(),
        num_blocks=NUM_BLOCKS,
        max_model_len=200,
    )
    yield core
    core.shutdown()


def test_a_tier_is_read_by_a_request_of_the_same_weights(core: EngineCore) -> None:
    add(core, "first", TEXT, max_tokens=3)
    Streams(core).run()
    assert core.scheduler.kv_cache_manager.reset_prefix_cache()
    add(core, "second", TEXT, max_tokens=3)
    Streams(core).run()
    worker: Any = core.model_executor
    assert worker.num_loaded == len(TEXT) // 16


def retracted_by_the_commit(core: EngineCore) -> None:
    streams = Streams(core).step(8)
    publish_weights(core, 1, "one", mode="retract")
    streams.run()


def retracted_by_a_pause_before_the_commit(core: EngineCore) -> None:
    streams = Streams(core).step(8)
    ask(core, "pause", mode="retract")
    publish_weights(core, 1, "one")
    call(core, "resume")
    streams.run()


def sent_back_by_a_full_cache_before_the_commit(core: EngineCore) -> None:
    probe, streams = core.scheduler.requests["probe"], Streams(core)
    while not probe.num_preemptions:
        streams.step()
    publish_weights(core, 1, "one")
    streams.run()


def retracted_twice(core: EngineCore) -> None:
    """The first weights are back, and their KV of then is not theirs of now."""
    streams = Streams(core).step(8)
    publish_weights(core, 1, "one", mode="retract")
    streams.step(4)
    publish_weights(core, 0, "two", mode="retract")
    streams.run()


WAYS = [
    retracted_by_the_commit,
    retracted_by_a_pause_before_the_commit,
    sent_back_by_a_full_cache_before_the_commit,
    retracted_twice,
]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_computed_again_reads_no_kv_of_before_from_a_tier(
    core: EngineCore, way: Callable[[EngineCore], None]
) -> None:
    worker: Any = core.model_executor
    if way is sent_back_by_a_full_cache_before_the_commit:
        add(core, "first", prompt(2, 90), max_tokens=60)
    add(core, "probe", TEXT, max_tokens=60)
    way(core)
    add(core, "again", TEXT, max_tokens=3)
    Streams(core).run()
    for name in ("probe", "again"):
        assert set(worker.sampled[name][-1].generations) == {worker.generation}, name


def test_what_is_computed_again_is_kept_in_the_tier_under_its_own_weights(
    core: EngineCore,
) -> None:
    add(core, "probe", TEXT, max_tokens=60)
    retracted_by_the_commit(core)
    assert core.scheduler.kv_cache_manager.reset_prefix_cache()
    add(core, "again", TEXT, max_tokens=3)
    Streams(core).run()
    worker: Any = core.model_executor
    assert worker.num_loaded == len(TEXT) // 16
    assert set(worker.sampled["again"][-1].kv) == {1}
