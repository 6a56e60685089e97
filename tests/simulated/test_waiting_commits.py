"""Commits that wait for running requests, and who may come in between."""

from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.engine.bare_core import add, call, prompt
from tests.simulated.core import publish_weights, stage_weights
from tests.simulated.load import answered, ask, code, started
from tests.waiting import until

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
    commit = waiting_commit(core)
    updates = core.inflight_gate.updates
    updates.ledger.active.deadline = 0.0
    # Who watches over it ends when that is done and told.
    until(lambda: updates._watch._thread is None, "its deadline ends nothing")
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


def test_a_commit_that_waits_switches_from_the_version_that_it_expects(
    core: EngineCore,
) -> None:
    streams = started(core)
    stage_weights(core, 1)
    commit = ask(core, "commit", mode="wait", expect_version="default")
    call(core, "rename", weight_version="another")
    streams.step(60).run()
    assert code(answered(commit)) == "version_conflict"
    assert call(core, "info")["weight_version"] == "another"
    assert call(core, "status")["active"]["phase"] == "staged"
    call(core, "commit", expect_version="another")


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
