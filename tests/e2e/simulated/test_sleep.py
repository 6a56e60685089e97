"""Sleep of an engine with a loop of its own: what runs ends, and nothing begins."""

from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import (
    assert_told_truly,
    publish_weights,
    stage_weights,
)
from tests.support.waiting import until
from vllm.inflight.errors import EngineAsleep, EngineFault


def told(core: EngineCore, method: str, **body: Any) -> str:
    """The code of the error that a call is answered with."""
    return str(core.inflight(method, body)["error"]["code"])


def answered(streams: Streams, answer: Future[None]) -> None:
    """Go on with the loop until a sleep has been answered."""
    for _ in range(400):
        if answer.done():
            break
        streams.step()
    answer.result(timeout=0)


def slept(streams: Streams, answer: Any) -> Streams:
    """Go on with the loop until the engine is asleep."""
    if answer is not None:
        answered(streams, answer)
    assert "weights" in streams.core.model_executor.sleeping_tags
    return streams


def goes_on(core: EngineCore, streams: Streams) -> None:
    """Go on with the loop until the lease of its pause has run out."""

    def is_going() -> bool:
        streams.step()
        return not core.is_scheduler_paused()

    until(is_going, "the lease has run out, and it stands still")


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_a_sleep_aborts_keeps_or_finishes_requests_according_to_its_mode(
    core: EngineCore, mode: str
) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(5)
    answer = core.sleep(1, mode)
    assert told(core, "start", transport="local") == "engine_asleep"
    add(core, "arrives", prompt(2))
    slept(streams, answer).step(5)
    num_tokens = len(streams.tokens["runs"])
    assert (num_tokens == 60) is (mode == "wait")
    core.wake_up(["weights"])
    publish_weights(core, 1, "one")
    core.wake_up(["kv_cache"])
    streams.run()
    assert len(streams.tokens["runs"]) == (num_tokens if mode == "abort" else 60)
    assert set(streams.stamps["arrives"]) == {"one"}
    assert_told_truly(core, streams, lambda weights: ["default", "one"][weights])


def test_a_sleep_ends_a_waiting_commit_and_leaves_the_engine_paused(
    core: EngineCore,
) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(5)
    stage_weights(core, 1)
    commit = core.inflight("commit", {"mode": "wait"})
    assert isinstance(commit, Future) and not commit.done()
    slept(streams, core.sleep(1, "abort"))
    add(core, "arrives", prompt(2))
    num_before = sum(map(len, streams.tokens.values()))
    streams.step(20)
    assert commit.result(timeout=60)["error"]["code"] == "engine_asleep"
    assert core.is_scheduler_paused()
    assert sum(map(len, streams.tokens.values())) == num_before
    core.wake_up()
    assert len(streams.run().tokens["arrives"]) == 40


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_sleep_that_fails_leaves_an_engine_that_can_be_updated(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    def fail(level: int) -> None:
        raise MemoryError("the host lacks memory")

    monkeypatch.setattr(core.model_executor, "sleep", fail)
    streams = Streams(core)
    if is_busy:
        add(core, "runs", prompt(1))
        streams.step(3)
    with pytest.raises(MemoryError):
        answered(streams, core.sleep(1, "wait"))
    monkeypatch.undo()
    assert call(core, "info")["weights"] == "live"
    assert core.model_executor.drowsy == 0
    publish_weights(core, 1, "one")
    call(core, "resume")


def test_the_calls_of_a_pause_leave_a_sleep_alone(core: EngineCore) -> None:
    call(core, "pause", mode="in_place", owner="trainer")
    slept(Streams(core), core.sleep(1, "keep"))
    call(core, "pause", mode="retract", owner="trainer")
    assert told(core, "resume", owner="trainer") == "engine_asleep"
    with pytest.raises(EngineAsleep):
        core.collective_rpc("compute_weight_checksums")
    core.wake_up()
    assert call(core, "paused")["mode"] == "retract"
    call(core, "resume", owner="trainer")
    assert not core.is_scheduler_paused()


@pytest.mark.parametrize("what", ["lease", "commit"])
def test_a_sleep_of_level_0_ends_with_nothing_but_waking_up_or_a_continue(
    core: EngineCore, what: str
) -> None:
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(5)
    if what == "lease":
        core.inflight("pause", {"mode": "wait", "lease_s": 0.2})
    else:
        stage_weights(core, 1)
        core.inflight("commit", {"mode": "wait"})
    core.sleep(0, "abort")
    streams.step(3)

    def is_dropped() -> bool:
        streams.step()
        return call(core, "paused")["lease_left_s"] is None

    until(is_dropped, "the lease does not run out")
    add(core, "arrives", prompt(2))
    streams.step(5)
    state = call(core, "paused")
    assert (state["is_paused"], state["lease_left_s"]) == (True, None)
    assert state["for_commit"] is False
    assert "arrives" not in streams.tokens
    if what == "lease":
        core.wake_up(["scheduling"])
    else:
        call(core, "resume")
    assert len(streams.run().tokens["arrives"]) == 40
    # It has ended: the next pause ends with its lease.
    core.inflight("pause", {"mode": "in_place", "lease_s": 0.1})
    goes_on(core, streams)
    assert call(core, "paused")["is_paused"] is False


def test_a_sleep_that_one_rank_rejects_is_undone_on_all_ranks(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(level: int) -> dict[str, Any]:
        asked.append(level)
        return {"error": "the host lacks memory"} if level else {"ok": None}

    monkeypatch.setattr(core.model_executor, "_inflight_prepare_sleep", refuse)
    add(core, "runs", prompt(1))
    with pytest.raises(EngineFault, match="lacks memory"):
        core.sleep(1)
    assert asked == [1, 0]
    assert call(core, "info")["weights"] == "live"
    assert len(Streams(core).run().tokens["runs"]) == 40  # it was not even paused


@pytest.mark.parametrize(("level", "weights"), [(1, "live"), (2, "gone")])
def test_an_engine_with_a_rank_that_failed_to_sleep_recovers_by_waking_up(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, level: int, weights: str
) -> None:
    def fail() -> None:
        raise MemoryError("the host lacks memory")

    monkeypatch.setattr(core.model_executor, "_sleep", fail, raising=False)
    config = core.vllm_config.model_config
    monkeypatch.setattr(config, "enable_sleep_mode", True)
    with pytest.raises(MemoryError):
        answered(Streams(core), core.sleep(level))
    assert told(core, "start", transport="local") == "engine_asleep"
    add(core, "arrives", prompt(2))
    assert Streams(core).step(5).tokens == {}
    core.wake_up()
    assert call(core, "info")["weights"] == weights
    publish_weights(core, 1, "one")
    assert set(Streams(core).run().stamps["arrives"]) == {"one"}


def test_a_rejected_sleep_does_not_hold_a_pause_beyond_its_lease(
    core: EngineCore,
) -> None:
    with pytest.raises(ValueError, match="nap"):
        core.sleep(0, "nap")
    call(core, "pause", mode="in_place", lease_s=0.05)
    goes_on(core, Streams(core))


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_a_wake_up_during_a_sleep_call_takes_effect_after_the_sleep(
    core: EngineCore, mode: str
) -> None:
    add(core, "runs", prompt(1), max_tokens=20)
    streams = Streams(core).step(5)
    asleep = core.sleep(1, mode)
    awake = core.wake_up()
    assert not asleep.done() and not awake.done()
    streams.step(40)
    asleep.result(timeout=0)
    assert awake.result(timeout=0) is True
    assert call(core, "info")["weights"] == "live"
    assert not core.model_executor.is_sleeping
    add(core, "arrives", prompt(2))
    assert len(streams.run().tokens["arrives"]) == 40


def test_a_second_sleep_hurries_the_first_and_is_of_its_level(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    executor = core.model_executor
    usual = type(executor).sleep

    def sleep(level: int) -> None:
        levels.append(level)
        usual(executor, level)

    monkeypatch.setattr(executor, "sleep", sleep)
    add(core, "runs", prompt(1), max_tokens=60)
    streams = Streams(core).step(5)
    first, second = core.sleep(1, "wait"), core.sleep(2, "abort")
    streams.step(5)
    assert first.done() and second.done() and set(levels) == {1}
    assert streams.finished == {"runs": "abort"}
    core.wake_up()
    assert call(core, "info")["weights"] == "live"
