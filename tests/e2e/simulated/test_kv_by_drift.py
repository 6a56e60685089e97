"""`versioned:auto`: updates that hardly move the weights, and what they retract."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import (
    publish_weights,
    simulated_core,
    stage_weights,
)
from vllm.inflight.engine.scheduling.request_state import RequestState

pytestmark = pytest.mark.engine

TEXT = prompt(1, 90)


@pytest.fixture
def core(model: Path) -> Iterator[EngineCore]:
    core = simulated_core(model, inflight={"prefix_cache": "versioned:auto"})
    yield core
    core.shutdown()


def move_a_little(core: EngineCore, weights: int, **commit: str) -> None:
    stage_weights(core, weights)
    core.vllm_inflight.updates.ledger.active.drift = {"overall": 1e-4}
    call(core, "commit", **commit)


def run(core: EngineCore, name: str) -> None:
    add(core, name, TEXT, max_tokens=3)
    Streams(core).run()


def read_by(core: EngineCore, name: str) -> set[int]:
    """The generations whose KV a request read for its last token."""
    return set(core.model_executor.sampled[name][-1].generations)


def by_the_commit(core: EngineCore, weights: int) -> None:
    move_a_little(core, weights, mode="retract")


def by_a_pause_before_the_commit(core: EngineCore, weights: int) -> None:
    call(core, "pause", mode="retract")
    move_a_little(core, weights, mode="in_place")
    call(core, "resume")


def by_a_pause_that_was_over(core: EngineCore, weights: int) -> None:
    """Somebody computes the old KV again before the retracted one has its turn."""
    call(core, "pause", mode="retract")
    probe = next(r for r in core.scheduler.waiting if r.request_id == "probe")
    core.scheduler.waiting.remove_request(probe)
    call(core, "resume")
    run(core, "between")
    core.scheduler.waiting.add_request(probe)
    move_a_little(core, weights, mode="in_place")


WAYS = [by_the_commit, by_a_pause_before_the_commit, by_a_pause_that_was_over]


@pytest.mark.parametrize("retracted", WAYS)
def test_a_retracted_request_reads_kv_of_the_live_weights_only(
    core: EngineCore, retracted: Callable[[EngineCore, int], None]
) -> None:
    add(core, "probe", TEXT, max_tokens=60)
    streams = Streams(core).step(8)
    for weights in (1, 2):
        retracted(core, weights)
        streams.step(4)
        assert read_by(core, "probe") == {weights}
    streams.run()


def test_kv_of_a_retracted_request_is_read_only_under_weights_near_its_own(
    core: EngineCore,
) -> None:
    add(core, "probe", TEXT, max_tokens=60)
    streams = Streams(core).step(8)
    by_the_commit(core, 1)
    streams.step(4)
    move_a_little(core, 2)  # its later blocks are mixed
    streams.run()
    run(core, "near")
    assert read_by(core, "near") == {0, 2}
    for weights in (3, 4):
        publish_weights(core, weights, f"far {weights}")
        run(core, f"far {weights}")
        assert read_by(core, f"far {weights}") == {weights}


def test_requests_retracted_together_share_recomputed_kv(
    core: EngineCore,
) -> None:
    add(core, "probe", TEXT, max_tokens=30)
    streams = Streams(core).step(4)
    add(core, "other", TEXT, max_tokens=30)
    streams.step(4)
    other = core.scheduler.requests["other"]
    by_the_commit(core, 1)
    streams.run()
    assert RequestState.of(other).num_found == 80
    assert read_by(core, "other") == {1}
