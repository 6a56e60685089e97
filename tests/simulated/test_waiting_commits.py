"""Commits that wait for running requests, and who may come in between."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.engine.bare_core import Streams, add, call, prompt
from tests.simulated.core import publish_weights, stage_weights
from tests.simulated.load import answered, ask, code, started

pytestmark = pytest.mark.engine


def waiting_commit(core: EngineCore) -> Future[Any]:
    stage_weights(core, 1)
    commit = ask(core, "commit", mode="wait", weight_version="one")
    assert not commit.done()
    return commit


def test_a_commit_that_waits_is_done_when_the_running_requests_are(
    core: EngineCore,
) -> None:
    streams = started(core)
    commit = waiting_commit(core)
    add(core, "late", prompt(9))
    state = call(core, "paused")
    assert (state["is_paused"], state["for_commit"]) == (True, True)
    streams.step(60).run()
    assert answered(commit)["ok"]["weight_version"] == "one"
    assert set(streams.stamps["r0"]) == {"default"}
    assert set(streams.stamps["late"]) == {"one"}
    assert call(core, "paused")["is_paused"] is False


def test_a_commit_that_waits_cannot_be_continued_away(core: EngineCore) -> None:
    started(core)
    waiting_commit(core)
    assert code(core.inflight("resume", {})) == "pause_conflict"


def test_waking_up_an_engine_that_is_awake_lets_nobody_in(core: EngineCore) -> None:
    streams = started(core)
    commit = waiting_commit(core)
    assert core.wake_up() is True
    add(core, "late", prompt(9))
    assert call(core, "paused")["for_commit"] is True
    streams.step(60).run()
    assert answered(commit)["ok"]["weight_version"] == "one"
    assert set(streams.stamps["late"]) == {"one"}


def test_an_update_that_is_aborted_lets_new_requests_in_again(
    core: EngineCore,
) -> None:
    streams = started(core)
    commit = waiting_commit(core)
    add(core, "late", prompt(9))
    call(core, "abort")
    streams.step(2)
    assert code(answered(commit)) == "wrong_phase"
    assert call(core, "paused")["is_paused"] is False
    assert "late" in streams.run().finished


def test_an_update_past_its_deadline_lets_new_requests_in_again(
    core: EngineCore,
) -> None:
    streams = started(core)
    call(core, "begin", transport="local", deadline_s=0.1)
    call(core, "receive", update_info={"weights": 1})
    call(core, "seal")
    commit = ask(core, "commit", mode="wait")
    time.sleep(0.2)
    streams.step(2)
    assert code(answered(commit)) == "deadline_exceeded"
    assert call(core, "paused")["is_paused"] is False


def test_a_pause_keeps_a_commit_from_waiting_for_what_stands_still(
    core: EngineCore,
) -> None:
    streams = started(core)
    commit = waiting_commit(core)
    ask(core, "pause", mode="in_place")
    streams.step(3)
    assert "paused" in answered(commit)["error"]["message"]
    assert call(core, "status")["active"]["phase"] == "staged"
    assert call(core, "paused")["mode"] == "in_place"
    assert code(core.inflight("commit", {"mode": "wait"})) == "pause_conflict"
    call(core, "commit", weight_version="one")
    assert call(core, "paused")["mode"] == "in_place", "the pause is its owner's"


def test_a_commit_that_waited_leaves_the_pause_of_somebody_else(
    core: EngineCore,
) -> None:
    streams = started(core)
    paused = ask(core, "pause", mode="wait", owner="trainer")
    commit = waiting_commit(core)
    streams.step(60)
    assert answered(paused)["ok"]["mode"] == "wait"
    assert answered(commit)["ok"]["weight_version"] == "one"
    state = call(core, "paused")
    assert (state["mode"], state["owner"]) == ("wait", "trainer")


@pytest.mark.parametrize("between", ["commit", "begin"])
def test_a_rollback_that_waits_takes_nothing_else_back(
    core: EngineCore, between: str
) -> None:
    publish_weights(core, 1, "one")
    publish_weights(core, 2, "two")
    streams = started(core)
    rollback = ask(core, "rollback", to_version="one", mode="wait")
    assert not rollback.done()
    if between == "commit":
        publish_weights(core, 3, "three")
    else:
        call(core, "begin", transport="local")
    streams.step(60).run()
    expected = {"commit": "version_conflict", "begin": "update_in_progress"}[between]
    assert code(answered(rollback)) == expected
    served = {"commit": "three", "begin": "two"}[between]
    assert call(core, "info")["weight_version"] == served
    assert call(core, "paused")["is_paused"] is False


# ------------------------------------------------ requests that a full cache sent back
def sent_back(core: EngineCore) -> Streams:
    """A core whose second request has run, and lies in the queue again."""
    for seed in range(3):
        add(core, f"r{seed}", prompt(seed, 60), max_tokens=60)
    streams = Streams(core)
    while not core.scheduler.requests["r2"].num_preemptions:
        streams.step()
    assert core.scheduler.running
    add(core, "late", prompt(9))
    return streams


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def small(
    make: Callable[..., EngineCore], request: pytest.FixtureRequest
) -> EngineCore:
    """A core without room for three requests at once."""
    return make(num_blocks=16, max_model_len=200, is_async=request.param)


def test_a_commit_that_waits_waits_for_a_request_that_was_sent_back(
    small: EngineCore,
) -> None:
    streams = sent_back(small)
    commit = waiting_commit(small)
    streams.step(200).run()
    assert answered(commit)["ok"]["weight_version"] == "one"
    for name in ("r0", "r1", "r2"):
        assert len(streams.tokens[name]) == 60
        assert set(streams.stamps[name]) == {"default"}, name
    assert set(streams.stamps["late"]) == {"one"}


def test_a_pause_that_waits_is_there_when_a_request_that_was_sent_back_has_ended(
    small: EngineCore,
) -> None:
    streams = sent_back(small)
    paused = ask(small, "pause", mode="wait")
    assert call(small, "paused")["is_draining"] is True
    while not paused.done():
        streams.step()
    assert set(streams.finished) == {"r0", "r1", "r2"}
    assert call(small, "paused")["is_draining"] is False
    call(small, "resume")
    assert set(streams.run().finished) == {"r0", "r1", "r2", "late"}


def test_those_that_were_sent_back_keep_their_order_and_go_before_the_new(
    small: EngineCore,
) -> None:
    streams = sent_back(small)
    ask(small, "pause", mode="retract")
    streams.step(2)
    before = [request.request_id for request in small.scheduler.waiting]
    call(small, "resume")
    pausing = ask(small, "pause", mode="wait")
    streams.step(1)
    waiting = [request.request_id for request in small.scheduler.waiting]
    assert waiting == [name for name in before if name in waiting]
    assert waiting[-1] == "late"
    while not pausing.done():
        streams.step()
    assert set(streams.finished) == {"r0", "r1", "r2"}
