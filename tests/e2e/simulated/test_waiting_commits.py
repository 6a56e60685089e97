"""Commits that wait for running requests, and who may come in between."""

from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import publish_weights, stage_weights
from tests.support.simulated.load import answered, ask, code, started
from tests.support.waiting import until
from vllm.inflight.errors import WrongPhase

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


def test_a_waiting_commit_cannot_be_ended_by_a_continue(core: EngineCore) -> None:
    started(core)
    waiting_commit(core)
    assert code(core.inflight("resume", {})) == "pause_conflict"


def test_a_wake_up_of_an_awake_engine_admits_no_requests_during_a_waiting_commit(
    core: EngineCore,
) -> None:
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
    updates = core.vllm_inflight.updates
    updates.ledger.active.deadline = 0.0
    # Who watches over it ends when that is done and told.
    until(lambda: updates._watch._thread is None, "its deadline ends nothing")
    streams.step(2)
    assert code(answered(commit)) == "deadline_exceeded"
    assert call(core, "paused")["is_paused"] is False


def test_a_pause_ends_a_commit_that_waits_for_the_paused_requests(
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


def test_a_waiting_commit_leaves_another_owners_pause_in_force(
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


# Rollbacks that wait


def waiting_rollback(core: EngineCore) -> tuple[Streams, Future[Any]]:
    publish_weights(core, 1, "one")
    publish_weights(core, 2, "two")
    streams = started(core)
    rollback = ask(core, "rollback", to_version="one", mode="wait")
    assert not rollback.done()
    return streams, rollback


def test_a_waiting_rollback_is_reported_with_its_version(core: EngineCore) -> None:
    waiting_rollback(core)
    told = call(core, "status")
    assert told["active"] is None
    assert told["rollback"]["to_version"] == "one"
    assert 0 < told["rollback"]["deadline_left_s"] <= 600
    call(core, "abort")
    assert call(core, "status")["rollback"] is None


@pytest.mark.parametrize("method", ["start", "may_start", "rollback"])
def test_no_call_drops_the_target_of_a_waiting_rollback(
    core: EngineCore, method: str
) -> None:
    streams, rollback = waiting_rollback(core)
    body = {"transport": "local"} if method == "start" else {}
    refused = core.inflight(method, body)["error"]
    assert refused["code"] == "update_in_progress"
    for name in ("'one'", "/abort_weight_update", "/continue_generation"):
        assert name in refused["message"]
    streams.step(60).run()
    assert answered(rollback)["ok"]["weight_version"] == "one"
    assert call(core, "paused")["is_paused"] is False


@pytest.mark.parametrize("method", ["abort", "resume"])
def test_an_abort_or_a_continue_ends_a_waiting_rollback(
    core: EngineCore, method: str
) -> None:
    streams, rollback = waiting_rollback(core)
    add(core, "late", prompt(9))
    call(core, method)
    told = answered(rollback)["error"]
    assert told["code"] == {"abort": "wrong_phase", "resume": "pause_conflict"}[method]
    assert "the rollback to 'one' was given up" in told["message"]
    assert call(core, "paused")["is_paused"] is False
    assert "late" in streams.run().finished
    info = call(core, "info")
    assert (info["weight_version"], info["previous"]["weight_version"]) == (
        "two",
        "one",
    )
    call(core, "rollback", to_version="one")


def test_a_rollback_does_not_wait_for_ever(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(is_async=True, inflight={})
    publish_weights(core, 1, "one")
    publish_weights(core, 2, "two")
    streams = started(core)
    given = core.vllm_config.additional_config["inflight"]
    monkeypatch.setitem(given, "update_deadline_s", 0.2)
    rollback = ask(core, "rollback", to_version="one", mode="wait")
    turns = core.vllm_inflight.step_queue
    until(lambda: turns._queue, "its deadline ends nothing")
    streams.step(2)
    assert code(answered(rollback)) == "deadline_exceeded"
    assert "after 0.2 s" in answered(rollback)["error"]["message"]
    assert call(core, "paused")["is_paused"] is False
    assert call(core, "info")["weight_version"] == "two"


def test_a_pause_ends_a_rollback_that_waits_and_says_what_is_served(
    core: EngineCore,
) -> None:
    streams, rollback = waiting_rollback(core)
    ask(core, "pause", mode="in_place")
    streams.step(3)
    assert answered(rollback)["error"]["message"].endswith("the version served stays")
    assert call(core, "info")["weight_version"] == "two"


def test_a_waiting_rollback_continues_when_another_owners_pause_ends(
    core: EngineCore,
) -> None:
    streams, rollback = waiting_rollback(core)
    ask(core, "pause", mode="wait")
    call(core, "resume")
    assert not rollback.done()
    streams.step(60).run()
    assert answered(rollback)["ok"]["weight_version"] == "one"


def test_the_end_of_an_update_ends_no_rollback_that_waits(core: EngineCore) -> None:
    streams, rollback = waiting_rollback(core)
    controller = core.vllm_inflight
    controller._ended(
        controller.live_version.update, WrongPhase("a late word of an earlier update")
    )
    streams.step(60).run()
    assert answered(rollback)["ok"]["weight_version"] == "one"


def test_no_rollback_comes_into_a_sleep_that_has_begun(core: EngineCore) -> None:
    """What a sleep has put aside by then would come back under the new label."""
    streams, rollback = waiting_rollback(core)
    core.vllm_inflight.sleep._level_under_way = 1
    streams.step(60).run()
    core.vllm_inflight.sleep._level_under_way = 0
    assert code(answered(rollback)) == "engine_asleep"
    assert call(core, "info")["weight_version"] == "two"
