"""Mode `wait` waits for requests that a full cache has preempted."""

from collections.abc import Callable

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import assert_told_truly, stage_weights
from tests.support.simulated.load import LABELS, answered, ask, code

pytestmark = pytest.mark.engine

FULL = {"num_blocks": 13, "max_model_len": 128}
"""A cache with room for two of three requests, when they are long."""


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def streams(make: Callable[..., EngineCore], request: pytest.FixtureRequest) -> Streams:
    """A core in the middle of three requests, and the last of them has to wait."""
    core = make(is_async=request.param, **FULL)
    for seed in range(3):
        add(core, f"r{seed}", prompt(seed))
    streams = Streams(core)
    for _ in range(100):
        if core.scheduler.vllm_inflight.sent_back():
            return streams
        streams.step()
    raise AssertionError("the cache was not full")


def test_a_waiting_commit_waits_for_preempted_requests(streams: Streams) -> None:
    core = streams.core
    stage_weights(core, 1)
    commit = ask(core, "commit", mode="wait", weight_version="one")
    add(core, "late", prompt(9))
    streams.step(200).run()
    assert answered(commit)["ok"]["weight_version"] == "one"
    for name in ("r0", "r1", "r2"):
        assert streams.stamps[name] == ["default"] * 40
    assert set(streams.stamps["late"]) == {"one"}
    assert_told_truly(core, streams, LABELS.get)


def test_a_waiting_pause_lets_preempted_requests_finish(streams: Streams) -> None:
    core = streams.core
    add(core, "late", prompt(9))
    paused = ask(core, "pause", mode="wait")
    assert call(core, "paused")["is_draining"] is True
    streams.step(200)
    assert answered(paused)["ok"]["num_waiting"] == 1
    assert set(streams.finished) == {"r0", "r1", "r2"}
    assert "late" not in streams.tokens
    assert call(core, "paused")["is_draining"] is False
    call(core, "resume")
    assert len(streams.run().tokens["late"]) == 40


def test_requests_preempted_during_the_wait_go_on_in_order(
    make: Callable[..., EngineCore],
) -> None:
    core = make(is_async=True, **FULL)
    for seed in range(4):
        add(core, f"r{seed}", prompt(seed))
    streams = Streams(core).step(8)
    running = [each.request_id for each in core.scheduler.running]
    ask(core, "pause", mode="wait")
    streams.step(300)
    assert list(streams.finished) == running


def test_a_commit_waits_for_those_that_a_commit_has_retracted(core: EngineCore) -> None:
    add(core, "runs", prompt(1))
    streams = Streams(core).step(8)
    stage_weights(core, 1)
    call(core, "commit", mode="retract", weight_version="one")
    stage_weights(core, 2)
    commit = ask(core, "commit", mode="wait", weight_version="two")
    assert not commit.done()
    streams.step(80)
    assert answered(commit)["ok"]["weight_version"] == "two"
    assert set(streams.stamps["runs"]) == {"default", "one"}


def test_a_pause_that_holds_preempted_requests_rejects_the_waiting_commit(
    streams: Streams,
) -> None:
    core = streams.core
    stage_weights(core, 1)
    commit = ask(core, "commit", mode="wait")
    while core.scheduler.running:
        core.abort_requests([core.scheduler.running[0].request_id])
    ask(core, "pause", mode="in_place")
    streams.step(3)
    assert code(answered(commit)) == "pause_conflict"
    # What a pause has let go of is not waited for.
    call(core, "commit", mode="wait", weight_version="one")
    assert call(core, "paused")["mode"] == "in_place"
