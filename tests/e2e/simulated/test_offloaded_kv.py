"""KV that a connector keeps under the engine's block hashes, across commits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import (
    Loop,
    publish_weights,
    simulated_core,
    stage_weights,
)
from tests.support.simulated.load import answered, ask, code
from tests.support.simulated.tiered import Tiered, offloading
from vllm.inflight.engine.scheduling.prefix_cache import NamespacePolicy

pytestmark = pytest.mark.engine

TEXT = prompt(1, 90)
NUM_BLOCKS = 16
"""Of the GPU's cache: for one request and a half."""


def tiered(model: Path, **options: Any) -> EngineCore:
    return simulated_core(
        model,
        Tiered,
        kv_transfer_config=offloading(),
        num_blocks=NUM_BLOCKS,
        max_model_len=200,
        **options,
    )


@pytest.fixture
def core(model: Path) -> Iterator[EngineCore]:
    core = tiered(model)
    yield core
    core.shutdown()


@pytest.fixture(params=["sync", "async"])
def loop(model: Path, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """A core with a loop whose tier has KV of TEXT, and which itself has none."""
    is_async = request.param == "async"
    core = tiered(model, kind=Loop, is_async=is_async, max_num_batched_tokens=200)
    add(core, "first", TEXT, max_tokens=3)
    Streams(core).run().step(3)
    assert core.scheduler.kv_cache_manager.reset_prefix_cache()
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
def test_a_recomputed_request_reads_no_old_offloaded_kv(
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


def test_recomputed_kv_is_offloaded_under_its_own_weights(
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


# ------------------------------------------------------------ loaded, and not running
def loaded_without_a_turn(core: EngineCore) -> Streams:
    """The probe's KV has come from the tier, and a neighbour has the other blocks."""
    add(core, "probe", TEXT + prompt(5, 60), max_tokens=5)
    add(core, "neighbour", prompt(7, 90), max_tokens=20)
    streams, probe = Streams(core).step(4), core.scheduler.requests["probe"]
    assert probe.status.name == "WAITING"
    assert probe.num_computed_tokens == 80
    return streams


def at_the_commit(core: EngineCore, streams: Streams) -> int:
    return publish_weights(core, 1, "one", mode="retract")["num_retracted"]


def by_a_pause_before_the_commit(core: EngineCore, streams: Streams) -> int:
    paused = ask(core, "pause", mode="retract")
    streams.step(3)
    publish_weights(core, 1, "one")
    call(core, "resume")
    return answered(paused)["ok"]["num_retracted"]


@pytest.mark.parametrize("policy", ["versioned", "versioned:2", "shared"])
@pytest.mark.parametrize("way", [at_the_commit, by_a_pause_before_the_commit])
def test_a_request_with_loaded_kv_that_has_not_run_is_retracted(
    loop: EngineCore, way: Callable[[EngineCore, Streams], int], policy: str
) -> None:
    loop.scheduler.vllm_inflight.policy = NamespacePolicy.parse(policy)
    streams = loaded_without_a_turn(loop)
    assert way(loop, streams) == 2
    assert [r.request_id for r in loop.scheduler.waiting] == ["neighbour", "probe"]
    streams.run()
    worker: Any = loop.model_executor
    assert len(streams.tokens["probe"]) == 5
    assert set(worker.sampled["probe"][0].generations) == {worker.generation}


def test_requests_whose_kv_is_being_loaded_are_rejected_by_name(
    loop: EngineCore,
) -> None:
    add(loop, "probe", TEXT, max_tokens=5)
    Streams(loop).step()
    stage_weights(loop, 1)
    refused = loop.inflight("commit", {"mode": "retract"})
    assert code(refused) == "pause_conflict"
    assert "'probe' (waiting for remote KV)" in refused["error"]["message"]


def test_a_commit_waits_for_what_is_being_loaded(loop: EngineCore) -> None:
    add(loop, "probe", TEXT, max_tokens=5)
    streams = Streams(loop).step()
    assert not loop.scheduler.running
    stage_weights(loop, 1)
    commit = ask(loop, "commit", mode="wait", weight_version="one")
    assert not commit.done()
    streams.step(20)
    assert answered(commit)["ok"]["weight_version"] == "one"
    assert streams.stamps["probe"] == ["default"] * 5


def test_a_commit_does_not_wait_for_what_a_pause_keeps_from_its_turn(
    loop: EngineCore,
) -> None:
    add(loop, "probe", TEXT, max_tokens=5)
    streams = Streams(loop).step()
    stage_weights(loop, 1)
    commit = ask(loop, "commit", mode="wait")
    ask(loop, "pause", mode="in_place")
    streams.step(3)
    assert code(answered(commit)) == "pause_conflict"
    assert code(loop.inflight("commit", {"mode": "wait"})) == "pause_conflict"
