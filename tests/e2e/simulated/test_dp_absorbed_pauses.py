"""Absorbed pauses of data-parallel engines: all decode on, and all stop when one must.

Engines of a mixture of experts step together. An absorbed pause takes force on each of
them by itself, and they meet to stop.
"""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from tests.e2e.simulated.test_dp_pauses import later, states
from tests.support.simulated.dp_engines import NUM_ENGINES, Together
from tests.support.waiting import until
from vllm.inflight.api.control.control import Control
from vllm.inflight.engine.pause.absorption import Need

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def inflight() -> dict[str, Any]:
    return {"pauses": "absorb"}


def pause(both: Together, mode: str) -> None:
    reply = asyncio.run(Control(both).pause(mode))
    assert [each["absorbed"] for each in reply["engines"]] == [True, True]


def num_forwards(both: Together) -> list[int]:
    return [len(core.model_executor.forwards) for core in both.cores]


def go_on(both: Together) -> None:
    """Wait until both have made two more steps."""
    before = num_forwards(both)
    until(
        lambda: all(
            now > then + 1 for now, then in zip(num_forwards(both), before, strict=True)
        )
    )


def called(both: Together, rank: int, note: Any) -> Future[Any]:
    """A worker call that is not adopted, at one engine; the result when it comes."""
    answer: Future[Any] = Future()

    def act(core: Any) -> None:
        core.model_executor._tests_note = lambda *_: note(core)
        told = core.collective_rpc("tests_note")
        if isinstance(told, Future):
            told.add_done_callback(
                lambda done: answer.set_result(done.exception() or done.result())
            )
        else:
            answer.set_result(told)

    both.ask(rank, act)
    return answer


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_both_decode_on_and_commit_under_an_absorbed_pause(
    both: Together, mode: str
) -> None:
    both.start(2, 1)
    pause(both, mode)
    go_on(both)
    both.stage(1)
    replies = both.control("commit", weight_version="one")
    assert [reply["ok"]["weight_version"] for reply in replies] == ["one", "one"]
    retracted = [reply["ok"].get("num_retracted", 0) for reply in replies]
    assert retracted == ([2, 1] if mode == "retract" else [0, 0])
    go_on(both)
    assert [state["absorbed"] for state in states(both)] == [True, True]
    assert asyncio.run(Control(both).resume())["paused"] is False
    first, second = both.finish()
    if both.cores[0].vllm_inflight.dp_commit.is_kept:
        assert all(a == b for a, b in zip(first, second, strict=False))
    assert set(both.ends.values()) == {"length"}
    both.stage(0)
    both.control("commit", weight_version="default")


def test_a_call_that_needs_the_pause_comes_when_both_stand_still(
    both: Together,
) -> None:
    both.start(2, 1)
    pause(both, "in_place")
    seen: list[tuple[bool, int]] = []

    def note(core: Any) -> None:
        waiting = len(core.batch_queue or ())
        seen.append((core.is_scheduler_paused(), waiting))

    answers = [called(both, rank, note) for rank in range(NUM_ENGINES)]
    for answer in answers:
        assert not isinstance(answer.result(timeout=60), Exception)
    assert seen == [(True, 0)] * NUM_ENGINES
    assert [state["absorbed"] for state in states(both)] == [False, False]
    assert [state["is_paused"] for state in states(both)] == [True, True]
    for core in both.cores:
        assert core.vllm_inflight.counts.enforced[Need.WORKER_CALL] >= 1
    asyncio.run(Control(both).resume())
    both.finish()
    assert set(both.ends.values()) == {"length"}


@pytest.mark.parametrize("early", range(NUM_ENGINES))
def test_a_continue_that_overtakes_the_force_on_one_engine_lets_both_go_on(
    mixture: Together, early: int
) -> None:
    """It took force on one engine, which waits for the other to stop with it."""
    mixture.start(2, 1)
    mixture.let_end()
    pause(mixture, "in_place")
    seen: list[Any] = []
    answer = called(mixture, early, seen.append)
    until(lambda: mixture.cores[early].vllm_inflight.pauses.absorption.is_settling)
    replies = [later(mixture, rank, "resume") for rank in (1 - early, early)]
    assert all(not each.result(timeout=60)["ok"]["paused"] for each in replies)
    assert "decoding went on" in str(answer.result(timeout=60))
    assert not seen
    mixture.finish()
    assert set(mixture.ends.values()) == {"length"}


def test_the_force_of_one_engine_alone_ends_with_that_of_the_other(
    mixture: Together,
) -> None:
    mixture.start(2, 1)
    pause(mixture, "in_place")
    for core in mixture.cores:
        core.vllm_inflight.pauses.absorption._timer.cancel()
    seen: list[Any] = []
    first = called(mixture, 0, seen.append)
    go_on(mixture)
    assert not first.done(), "the other engine has not stopped"
    mixture.ask(
        1, lambda core: core.vllm_inflight.pauses.absorption.enforce(Need.NO_UPDATE)
    )
    first.result(timeout=60)
    assert len(seen) == 1
    asyncio.run(Control(mixture).resume())
    mixture.finish()
    assert set(mixture.ends.values()) == {"length"}
