"""The pause of a core as a state machine: every mode, every change, every overtaking.

Two steps are in flight, so a pause takes effect later than it is asked for.
"""

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import add, call, prompt, request
from tests.support.simulated.core import (
    assert_told_truly,
    publish_weights,
    stage_weights,
)
from tests.support.simulated.load import LABELS, answered, ask, code, count, started
from vllm.inflight.update import PAUSE_MOVES, PauseMode

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("first", PauseMode)
@pytest.mark.parametrize("second", PauseMode)
def test_a_pause_becomes_stricter_or_the_call_is_rejected(
    core: EngineCore, first: PauseMode, second: PauseMode
) -> None:
    streams = started(core)
    ask(core, "pause", mode=first)
    streams.step(1)
    answer = ask(core, "pause", mode=second)
    streams.step(50)
    state = call(core, "paused")
    if second in PAUSE_MOVES[first]:
        assert answered(answer)["ok"]["mode"] == state["mode"] == second
    else:
        assert code(answered(answer)) == "pause_conflict"
        assert state["mode"] == first
    assert state["is_paused"] is True
    assert call(core, "resume")["paused"] is False
    assert_told_truly(core, streams.run(), LABELS.get)


@pytest.mark.parametrize("mode", PauseMode)
def test_an_engine_is_paused_from_the_call_on_in_every_mode(
    core: EngineCore, mode: PauseMode
) -> None:
    streams = started(core)
    answer = ask(core, "pause", mode=mode)
    assert not answer.done(), "steps are in flight"
    state = call(core, "paused")
    assert (state["is_paused"], state["mode"]) == (True, mode)
    assert state["is_draining"] is (mode is PauseMode.WAIT)
    streams.step(60)
    assert answered(answer)["ok"]["paused"] is True
    assert call(core, "paused")["is_draining"] is False


@pytest.mark.parametrize("mode", PauseMode)
def test_pausing_twice_is_pausing_once(core: EngineCore, mode: PauseMode) -> None:
    streams = started(core)
    first, second = (ask(core, "pause", mode=mode) for _ in range(2))
    streams.step(60)
    first, second = (answered(each)["ok"] for each in (first, second))
    assert first["mode"] == second["mode"] == mode
    assert first["num_aborted"] + second["num_aborted"] == (3 if mode == "abort" else 0)
    again = call(core, "pause", mode=mode)
    assert (again["num_aborted"], again["num_retracted"]) == (0, 0)


@pytest.mark.parametrize("has_settled", [False, True])
@pytest.mark.parametrize("mode", PauseMode)
def test_a_renewal_leaves_those_queued_that_came_since(
    core: EngineCore, mode: PauseMode, has_settled: bool
) -> None:
    streams = started(core)
    pauses = [ask(core, "pause", mode=mode, lease_s=600)]
    streams.step(60 if has_settled else 0)
    for number in range(2):
        add(core, f"late{number}", prompt(7 + number))
        pauses.append(ask(core, "pause", mode=mode, lease_s=60))
    streams.step(60)
    replies = [answered(each)["ok"] for each in pauses]
    num_ended = 3 if mode is PauseMode.ABORT else 0
    assert [reply["num_aborted"] for reply in replies] == [num_ended, 0, 0]
    assert 0 < call(core, "paused")["lease_left_s"] <= 60
    assert not streams.tokens.get("late0")
    call(core, "resume")
    streams.run()
    assert {name: len(streams.tokens[name]) for name in ("late0", "late1")} == {
        "late0": 40,
        "late1": 40,
    }
    assert streams.finished["late0"] == streams.finished["late1"] == "length"
    assert_told_truly(core, streams, LABELS.get)


def test_a_session_that_came_since_does_not_end_the_renewals_of_a_pause(
    core: EngineCore,
) -> None:
    streams = started(core)
    ask(core, "pause", mode="retract", lease_s=600)
    streams.step(3)
    session = request("session", prompt(5))
    session.resumable = True
    core.add_request(*core.preprocess_add_request(session))
    assert call(core, "pause", mode="retract", lease_s=60)["num_retracted"] == 0
    assert call(core, "paused")["lease_left_s"] <= 60
    call(core, "resume")
    streams.step(60)
    assert len(streams.tokens["session"]) == 40


def test_a_pause_that_upstream_has_ended_is_not_renewed(core: EngineCore) -> None:
    streams = started(core)
    ask(core, "pause", mode="abort")
    streams.step(3)
    core.resume_scheduler()
    add(core, "late", prompt(7))
    streams.step(5)
    assert call(core, "paused")["is_paused"] is False
    again = ask(core, "pause", mode="abort")
    streams.step(3)
    assert answered(again)["ok"]["num_aborted"] == 1


def test_continuing_twice_is_continuing_once(core: EngineCore) -> None:
    streams = started(core)
    ask(core, "pause", mode="in_place")
    streams.step(3)
    assert call(core, "resume")["paused"] is False
    assert call(core, "resume")["paused"] is False
    assert_told_truly(core, streams.run(), LABELS.get)


@pytest.mark.parametrize("mode", PauseMode)
def test_a_pause_that_is_overtaken_by_a_continue_does_nothing_later(
    core: EngineCore, mode: PauseMode
) -> None:
    streams = started(core)
    answer = ask(core, "pause", mode=mode)
    call(core, "resume")
    assert code(answered(answer)) == "pause_conflict"
    streams.run()
    assert core.scheduler.pause_state.name == "UNPAUSED"
    if mode is not PauseMode.ABORT:
        assert count(streams) == 120


@pytest.mark.parametrize("mode", PauseMode)
def test_an_update_is_begun_staged_and_committed_under_any_pause(
    core: EngineCore, mode: PauseMode
) -> None:
    streams = started(core)
    ask(core, "pause", mode=mode)
    streams.step(60)
    publish_weights(core, 1, "one")
    assert call(core, "info")["weight_version"] == "one"
    call(core, "rollback")
    assert call(core, "info")["weight_version"] == "default"
    assert call(core, "paused")["mode"] == mode
    call(core, "resume")
    assert_told_truly(core, streams.run(), LABELS.get)


@pytest.mark.parametrize("mode", PauseMode)
def test_a_pause_leaves_a_staged_update_staged(
    core: EngineCore, mode: PauseMode
) -> None:
    streams = started(core)
    stage_weights(core, 1)
    ask(core, "pause", mode=mode)
    streams.step(60)
    call(core, "resume")
    assert call(core, "status")["active"]["phase"] == "staged"
    assert call(core, "commit", weight_version="one")["weight_version"] == "one"


def test_a_pause_that_cannot_end_yet_keeps_its_lease_and_owner(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = started(core)
    ask(core, "pause", mode="in_place", lease_s=60, owner="trainer")
    streams.step(60)

    def not_yet() -> None:
        raise RuntimeError("not yet")

    with monkeypatch.context() as broken:
        broken.setattr(core, "resume_scheduler", not_yet)
        assert "not yet" in core.inflight("resume", {})["error"]["message"]
    held = call(core, "paused")
    assert (held["is_paused"], held["owner"]) == (True, "trainer")
    assert held["lease_left_s"] > 0
    call(core, "resume")
    assert call(core, "paused")["owner"] is None
    streams.run()


def test_a_pause_of_upstreams_own_has_a_mode_too(core: EngineCore) -> None:
    streams = started(core)
    core.pause_scheduler("keep", False)
    streams.step(3)
    assert call(core, "paused")["mode"] == "in_place"
    assert code(core.inflight("pause", {"mode": "wait"})) == "pause_conflict"
    core.resume_scheduler()
    assert call(core, "paused") == call(core, "paused") | {"mode": None}
