"""Data-parallel engines that step together commit at the same step."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from tests.support.engines.bare_core import add, call, prompt
from tests.support.simulated.dp_engines import Together, together
from tests.support.waiting import until
from vllm.inflight.api.control.control import Control
from vllm.inflight.engine.update import dp_commit
from vllm.inflight.engine.update.dp_commit import DpCommit
from vllm.inflight.errors import Conflict, EngineFault, PauseConflict, UpdateBusy

pytestmark = pytest.mark.engine

LAG_S = 0.03
"""Between the calls of the two engines: dozens of steps."""


@pytest.fixture
def both(model: Path) -> Iterator[Together]:
    with together(model) as engines:
        yield engines


def labels(both: Together) -> list[str]:
    return [core.vllm_inflight.version.label for core in both.cores]


def test_both_engines_commit_at_the_same_step_and_keep_decoding(both: Together) -> None:
    both.start(3, 1)
    both.stage(1)
    replies = both.control("commit", LAG_S, weight_version="one")
    assert [r["ok"]["weight_version"] for r in replies] == ["one", "one"]
    first, second = both.finish()
    assert first == second[: len(first)] or second == first[: len(second)]
    assert set(first) == {0, 1}
    for name, core in (("r0", both.cores[0]), ("r10", both.cores[1])):
        made = core.model_executor.sampled[name]
        assert len(made) == 150
        assert both.stamps[name] == [("default", "one")[s.weights] for s in made]
        assert set(both.stamps[name]) == {"default", "one"}


def test_engines_mix_versions_in_a_step_without_the_synchronous_commit(
    both: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DpCommit, "is_kept", False)
    monkeypatch.setattr(DpCommit, "together", lambda self, flip, back: flip())
    both.start(3, 1)
    both.stage(1)
    both.control_apart("commit", weight_version="one")
    first, second = both.finish()
    assert any(a != b for a, b in zip(first, second, strict=False))


@pytest.mark.parametrize("failing", [0, 1])
def test_an_engine_that_cannot_commit_keeps_the_other_from_committing(
    both: Together, failing: int
) -> None:
    both.start(2, 2)
    both.stage(1)
    both.cores[failing].model_executor.is_to_fail = True
    replies = both.control("commit", LAG_S, weight_version="one")
    assert [r["error"]["code"] for r in replies] == ["engine_fault"] * 2
    assert "another data-parallel engine" in replies[1 - failing]["error"]["message"]
    assert labels(both) == ["default", "default"]
    assert [core.vllm_inflight.version.epoch for core in both.cores] == [0, 0]
    # It is still staged: what failed may be mended.
    replies = both.control("commit", LAG_S, weight_version="one")
    assert [r["ok"]["weight_version"] for r in replies] == ["one", "one"]
    first, second = both.finish()
    assert all(a == b for a, b in zip(first, second, strict=False))


def test_a_rollback_is_a_switch_of_both_as_well(both: Together) -> None:
    both.start(2, 1)
    both.stage(1)
    both.control("commit", LAG_S, weight_version="one")
    both.control("rollback", LAG_S)
    assert labels(both) == ["default", "default"]
    first, second = both.finish()
    assert all(a == b for a, b in zip(first, second, strict=False))
    assert set(first) == {0, 1}


def test_engines_without_work_commit_too(both: Together) -> None:
    both.stage(1)
    both.cores[0].has_coordinator = True
    replies = both.control("commit", weight_version="one")
    # The coordinator was told, which wakes those that nobody asked yet.
    client, told = both.cores[0].output_queue.get_nowait()
    assert (client, told.start_wave) == (-1, 0)
    both.cores[0].has_coordinator = False
    assert [r["ok"]["weight_version"] for r in replies] == ["one", "one"]
    first, second = both.finish()
    assert first == second
    both.start(1, 1)
    assert set(both.finish()[0][len(first) :]) == {1}


def test_a_synchronous_commit_works_with_retraction_and_under_a_pause(
    both: Together,
) -> None:
    both.start(2, 2)
    both.stage(1)
    assert all(r["ok"]["paused"] for r in both.control("pause", mode="in_place"))
    replies = both.control("commit", weight_version="one", mode="retract")
    assert [r["ok"]["num_retracted"] for r in replies] == [2, 2]
    both.control("resume")
    first, second = both.finish()
    assert all(a == b for a, b in zip(first, second, strict=False))
    for core in both.cores:
        for made in core.model_executor.sampled.values():
            assert all(set(s.kv) == {1} for s in made if s.weights == 1)


def test_a_pause_that_one_engine_rejects_pauses_no_engine(both: Together) -> None:
    both.start(0, 1)
    with pytest.raises(PauseConflict, match="stay in place"):
        asyncio.run(Control(both).pause("in_place", flush_cache=True))
    assert not any(r["ok"]["is_paused"] for r in both.control("paused"))
    first, second = both.finish()
    assert first == second
    assert len(both.stamps["r10"]) == 150


def slept(both: Together, level: int) -> None:
    for core in both.cores:
        core.vllm_config.model_config.enable_sleep_mode = True
    for asleep in both.of_both(lambda core: core.sleep(level, "keep")):
        asleep.result(timeout=60)


def test_a_commit_where_weights_were_gone_lets_decoding_go_on(both: Together) -> None:
    slept(both, 2)
    both.of_both(lambda core: core.wake_up())
    both.of_both(lambda core: add(core, f"r{core.dp_rank}", prompt(0)))
    both.stage(1)
    replies = both.control("commit", LAG_S, weight_version="one")
    assert [r["ok"]["weight_version"] for r in replies] == ["one", "one"]
    first, second = both.finish()
    assert first == second
    assert both.stamps == {"r0": ["one"] * 40, "r1": ["one"] * 40}


@pytest.mark.parametrize("level", [1, 2])
def test_a_request_that_arrives_before_both_engines_continue_starts_neither(
    both: Together, level: int
) -> None:
    if level == 1:
        both.control("pause", mode="in_place")
    slept(both, level)
    both.of_both(lambda core: core.wake_up())
    both.ask(0, lambda core: add(core, "r0", prompt(0))).result(timeout=60)
    # As the coordinator does when it hears of the request.
    wave = EngineCoreRequestType.START_DP_WAVE, (both.cores[1].current_wave, 0)
    both.ask(1, lambda core: core._handle_client_request(*wave)).result(timeout=60)
    assert not any(core.engines_running for core in both.cores)
    if level == 1:
        both.control("resume")
    else:
        both.stage(1)
        both.control("commit", LAG_S, weight_version="one")
    first, second = both.finish()
    assert first == second
    assert both.stamps == {"r0": [("default", "one")[level - 1]] * 40}


def test_requests_that_drain_under_a_pause_go_on_after_waking_up(
    both: Together,
) -> None:
    both.start(1, 0)
    both.of_both(lambda core: core.inflight("pause", {"mode": "wait"}))
    for asleep in both.of_both(lambda core: core.sleep(0, "keep")):
        asleep.result(timeout=60)
    both.of_both(lambda core: core.wake_up())
    assert all(state["ok"]["is_paused"] for state in both.control("paused"))
    first, second = both.finish()
    assert first == second
    assert len(both.stamps["r0"]) == 150


@pytest.mark.parametrize("hasty", [0, 1])
def test_both_engines_agree_on_each_of_two_successive_pauses(
    both: Together, hasty: int
) -> None:
    def pause(core: Any) -> None:
        core.inflight("pause", {"mode": "wait"})

    def pause_and_sleep(core: Any) -> Any:
        pause(core)
        return core.sleep(0, "keep")

    both.start(1, 0)
    sleeping = [both.ask(hasty, pause_and_sleep).result(timeout=60)]
    both.ask(1 - hasty, pause).result(timeout=60)
    agreed = both.cores[1 - hasty]
    until(lambda: not agreed.pending_pause)
    time.sleep(10 * LAG_S)  # as long as they could have met again
    sleep = both.ask(1 - hasty, lambda core: core.sleep(0, "keep"))
    sleeping.append(sleep.result(timeout=60))
    for asleep in sleeping:
        asleep.result(timeout=60)
    both.of_both(lambda core: core.wake_up())
    first, second = both.finish()
    assert first == second
    assert len(both.stamps["r0"]) == 150


def test_continuing_right_after_waking_up_is_continuing(both: Together) -> None:
    both.start(1, 1)
    both.control("pause", mode="in_place")
    slept(both, 1)

    def wake(core: Any) -> Any:
        core.wake_up()
        assert not core.engines_running, "the pause goes on, as it was"
        return core.inflight("resume", {})

    answers = map(outcome, both.of_both(wake))
    assert [answer["ok"]["paused"] for answer in answers] == [False, False]
    first, second = both.finish()
    assert first == second
    assert [len(told) for told in both.stamps.values()] == [150, 150]


def test_an_aborted_update_cancels_its_pending_commit(both: Together) -> None:
    both.start(2, 2)
    both.stage(1)
    asked = both.ask(0, lambda core: core.inflight("commit", {})).result(timeout=60)
    refused = both.ask(0, lambda core: core.inflight("rollback", {})).result(timeout=60)
    assert refused["error"]["code"] == "wrong_phase"
    both.control("abort")
    assert asked.result(timeout=60)["error"]["code"] == "wrong_phase"
    both.stage(2)
    assert all("ok" in r for r in both.control("commit", LAG_S, weight_version="two"))
    first, second = both.finish()
    assert all(a == b for a, b in zip(first, second, strict=False))


def test_a_reload_that_one_engine_rejects_runs_on_none(both: Together) -> None:
    both.start(2, 2)
    both.stage(1)
    both.ask(1, lambda core: call(core, "abort")).result(timeout=60)
    replies = both.control("commit", LAG_S)
    assert [r["error"]["code"] for r in replies] == ["engine_fault"] * 2
    both.control("abort")
    both.stage(1)
    expecting = ["default", "another"]

    def commit(core: Any) -> Any:
        return core.inflight("commit", {"expect_version": expecting[core.dp_rank]})

    answers = [answer.result(timeout=60) for answer in both.of_both(commit)]
    assert [a["error"]["code"] for a in answers] == ["engine_fault", "version_conflict"]
    assert labels(both) == ["default", "default"]
    first, second = both.finish()
    assert set(first) == {0} and all(
        a == b for a, b in zip(first, second, strict=False)
    )


def test_engines_skip_the_commit_agreement_if_one_engine_cannot_be_updated(
    both: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []
    extent = DpCommit._extent

    def counted(self: DpCommit, value: int) -> Any:
        met.append(value)
        return extent(self, value)

    monkeypatch.setattr(DpCommit, "_extent", counted)
    both.cores[1].vllm_inflight.ranks.reason = "the test says so"
    both.start(1, 1)
    both.ask(0, lambda core: core.vllm_inflight.dp_commit.arm("anything", dict)).result(
        timeout=60
    )
    both.finish()
    assert sorted(met) == [0, 1]
    assert not both.cores[0].vllm_inflight.dp_commit.is_armed


def test_engines_commit_together_an_update_started_without_an_id(
    both: Together,
) -> None:
    both.start(2, 1)
    both.stage(1, is_named=False)
    assert all("ok" in r for r in both.control("commit", LAG_S, weight_version="one"))
    assert labels(both) == ["one", "one"]
    both.finish()


def test_a_commit_fails_in_time_if_it_did_not_reach_every_engine(
    both: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dp_commit, "PATIENCE_S", 0.2)
    both.start(2, 2)
    both.stage(1)
    asked = both.ask(0, lambda core: core.inflight("commit", {})).result(timeout=60)
    again = both.ask(0, lambda core: core.inflight("commit", {})).result(timeout=60)
    for answer in (asked, again):
        message = answer.result(timeout=60)["error"]["message"]
        assert "did not reach every data-parallel engine" in message
    monkeypatch.undo()
    assert all("ok" in r for r in both.control("commit", weight_version="one"))
    both.finish()


def test_two_engines_that_got_different_calls_make_neither(both: Together) -> None:
    both.start(2, 2)
    both.stage(1)
    commit = both.ask(0, lambda core: core.inflight("commit", {})).result(timeout=60)

    def other(core: Any) -> Any:
        return core.vllm_inflight.dp_commit.arm("something else", dict)

    armed = both.ask(1, other).result(timeout=60)
    with pytest.raises(Exception, match="got different calls"):
        armed.result(timeout=60)
    assert commit.result(timeout=60)["error"]["code"] == "engine_fault"
    assert labels(both) == ["default", "default"]
    both.finish()


def test_a_commit_cannot_wait_for_requests_of_several_engines(both: Together) -> None:
    both.stage(1)
    replies = both.control("commit", mode="wait")
    assert [r["error"]["code"] for r in replies] == ["pause_conflict"] * 2
    both.finish()


def reload(both: Together, lag_s: float = 0.0, failing: int | None = None) -> list[Any]:
    """What both engines answer upstream's reload with, be it an error."""

    def act(core: Any) -> Any:
        args = (1, "of a test") if core.dp_rank == failing else (1,)
        return core.collective_rpc("reload_weights", args=args)

    answers = []
    for rank in range(2):
        answers.append(both.ask(rank, act))
        time.sleep(lag_s)
    return [outcome(outcome(answer)) for answer in answers]


def outcome(answer: Any) -> Any:
    if not isinstance(answer, Future):
        return answer
    try:
        return answer.result(timeout=60)
    except Exception as error:
        return error


def test_a_reload_is_of_both_at_the_same_step(both: Together) -> None:
    both.start(3, 1)
    assert reload(both, LAG_S) == [[None], [None]]
    first, second = both.finish()
    assert first == second[: len(first)] or second == first[: len(second)]
    assert set(first) == {0, 1}
    assert labels(both) == ["untracked-1", "untracked-1"]
    for name, core in (("r0", both.cores[0]), ("r10", both.cores[1])):
        made = core.model_executor.sampled[name]
        assert both.stamps[name] == [
            ("default", "untracked-1")[s.weights] for s in made
        ]


@pytest.mark.parametrize("failing", [0, 1])
def test_no_engine_decodes_after_a_reload_that_fails_on_one_engine(
    both: Together, failing: int
) -> None:
    both.start(1, 1)
    answers = reload(both, LAG_S, failing)
    assert all(isinstance(answer, EngineFault) for answer in answers)
    assert "of a test" in answers[failing].message
    assert "another data-parallel engine" in answers[1 - failing].message
    told = [reply["ok"] for reply in both.control("info")]
    assert [each["weights"] for each in told] == ["gone", "gone"]
    assert [each["digest"] for each in told] == [None, None]
    num_made = [len(c.model_executor.sampled[f"r{10 * c.dp_rank}"]) for c in both.cores]
    time.sleep(10 * LAG_S)
    for core, before in zip(both.cores, num_made, strict=True):
        assert len(core.model_executor.sampled[f"r{10 * core.dp_rank}"]) == before
    both.stage(2)
    replies = both.control("commit", LAG_S, weight_version="two")
    assert [r["ok"]["weight_version"] for r in replies] == ["two", "two"]
    both.finish()
    assert [len(told) for told in both.stamps.values()] == [150, 150]


def test_a_reload_that_one_engine_rejects_writes_on_no_engine(both: Together) -> None:
    both.start(1, 1)
    both.ask(1, lambda core: call(core, "start", transport="local")).result(timeout=60)
    answers = reload(both, LAG_S)
    assert isinstance(answers[0], Conflict)
    assert "another data-parallel engine" in str(answers[0])
    assert isinstance(answers[1], UpdateBusy)
    assert labels(both) == ["default", "default"]
    assert [reply["ok"]["weights"] for reply in both.control("info")] == ["live"] * 2
    both.control("abort")
    first, second = both.finish()
    assert set(first) == set(second) == {0}


def test_a_reload_after_a_sleep_of_level_2_lets_decoding_go_on(both: Together) -> None:
    slept(both, 2)
    both.of_both(lambda core: core.wake_up())
    both.of_both(lambda core: add(core, f"r{core.dp_rank}", prompt(0)))
    assert reload(both, LAG_S) == [[None], [None]]
    first, second = both.finish()
    assert first == second
    assert {len(told) for told in both.stamps.values()} == {40}


def own(both: Together, method: str, *args: Any) -> list[Any]:
    """What both answer a call of a user's own with, be it an error."""

    def act(core: Any) -> Any:
        return core.collective_rpc(method, args=args)

    return [outcome(both.ask(rank, act)) for rank in range(2)]


def test_layers_are_not_taken_aside_under_engines_that_step(both: Together) -> None:
    """The other engine would wait for a step of this one."""
    both.start(2, 2)
    answers = own(both, "tests_start_load")
    assert all(isinstance(answer, PauseConflict) for answer in answers)
    assert all("pause_generation" in str(answer) for answer in answers)
    assert not any(core.model_executor.is_loading for core in both.cores)
    first, second = both.finish()
    assert all(a == b for a, b in zip(first, second, strict=False))
    assert labels(both) == ["default", "default"]


def test_a_reload_in_several_calls_goes_on_under_a_pause(both: Together) -> None:
    both.start(1, 1)
    both.control("pause", mode="in_place")
    assert own(both, "tests_start_load") == [[None], [None]]
    assert [reply["ok"]["weights"] for reply in both.control("info")] == ["loading"] * 2
    assert own(both, "tests_finish_load", 1) == [[None], [None]]
    both.control("resume")
    first, second = both.finish()
    assert all(a == b for a, b in zip(first, second, strict=False))
    assert [len(told) for told in both.stamps.values()] == [150, 150]
    assert labels(both) == ["untracked-1", "untracked-1"]
