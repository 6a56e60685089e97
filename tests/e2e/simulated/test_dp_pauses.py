"""Pauses of data-parallel engines: all renew their leases, and all go on.

Engines of a mixture of experts step together. They meet to pause, and to go on. Those
of a dense model do both alone.
"""

import asyncio
import time
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from tests.support.engines.bare_core import add, end_lease, prompt
from tests.support.simulated.dp_engines import NUM_ENGINES, Together
from tests.support.waiting import until
from vllm.inflight.api.control.control import Control
from vllm.inflight.engine.pause import lease
from vllm.inflight.errors import OwnedByAnother
from vllm.inflight.update import PauseMode

pytestmark = pytest.mark.engine

OWNER = "trainer"
LONG_S = 600
SOON_S = 0.2
"""A lease that the test waits for."""
SHORT_S = 1.5
"""A lease that is renewed in time on a busy machine too."""
NUM_TOKENS = 40
"""Of a request that comes during a pause, as bare_core.py has it."""


def pause(both: Together, mode: str, lease_s: float, owner: str = OWNER) -> list[Any]:
    """The replies of both engines to a pause of their front end."""
    pausing = Control(both).pause(mode, lease_s=lease_s, owner=owner)
    replies: list[Any] = asyncio.run(pausing)["engines"]
    return replies


def states(both: Together) -> list[Any]:
    return [reply["ok"] for reply in both.control("paused")]


def num_expired(both: Together) -> list[int]:
    return [state["leases_expired"] for state in states(both)]


def are_paused(both: Together) -> set[bool]:
    return {state["is_paused"] for state in states(both)}


def arrive(both: Together, name: str) -> None:
    """One more request at each engine."""
    both.of_both(
        lambda core: add(core, f"{name}{core.dp_rank}", prompt(core.dp_rank + 7))
    )


def ends(both: Together, name: str) -> set[tuple[int, str]]:
    """How many tokens those got, and why they ended."""
    names = [f"{name}{rank}" for rank in range(NUM_ENGINES)]
    return {(len(both.stamps[each]), both.ends[each]) for each in names}


def run_out(both: Together, rank: int) -> None:
    """The lease of this engine ends, and that of the other one does not yet."""
    core = both.cores[rank]
    both.ask(rank, end_lease).result(timeout=60)
    until(
        lambda: (
            core.vllm_inflight.dp_commit.is_to_continue
            or not core.is_scheduler_paused()
        )
    )


def later(both: Together, rank: int, method: str, **body: Any) -> Future[Any]:
    """The answer of one engine to a control call, when it comes."""
    answer: Future[Any] = Future()

    def act(core: Any) -> None:
        told = core.inflight(method, body)
        if isinstance(told, Future):
            told.add_done_callback(lambda done: answer.set_result(done.result()))
        else:
            answer.set_result(told)

    both.ask(rank, act)
    return answer


@pytest.mark.parametrize("mode", PauseMode)
def test_a_renewal_extends_the_lease_on_both_engines_and_ends_no_request(
    both: Together, mode: PauseMode
) -> None:
    both.start(2, 1)
    both.let_end()
    begun = pause(both, mode, LONG_S)
    num_ended = [2, 1] if mode is PauseMode.ABORT else [0, 0]
    assert [reply["num_aborted"] for reply in begun] == num_ended
    for number, lease_s in enumerate((60, 2 * LONG_S)):
        arrive(both, f"late{number}-")
        for reply in pause(both, mode, lease_s):
            assert (reply["num_aborted"], reply["num_retracted"]) == (0, 0)
            assert lease_s - 30 < reply["lease_s"] <= lease_s
        for state in states(both):
            assert lease_s - 30 < state["lease_left_s"] <= lease_s
            assert (state["mode"], state["owner"]) == (mode, OWNER)
    with pytest.raises(OwnedByAnother):
        pause(both, mode, 1, owner="another")
    assert all(state["lease_left_s"] > LONG_S for state in states(both))
    asyncio.run(Control(both).resume(OWNER))
    both.finish()
    for number in range(2):
        assert ends(both, f"late{number}-") == {(NUM_TOKENS, "length")}
    of_before = {both.ends[name] for name in ("r0", "r1", "r10")}
    assert of_before == {"abort" if mode is PauseMode.ABORT else "length"}


@pytest.mark.parametrize("mode", PauseMode)
def test_a_lease_that_ends_lets_both_go_on(both: Together, mode: PauseMode) -> None:
    before = num_expired(both)
    both.start(2, 1)
    both.let_end()
    pause(both, mode, LONG_S)
    arrive(both, "late")
    pause(both, mode, SOON_S)
    until(lambda: are_paused(both) == {False}, "they did not go on")
    both.finish()
    assert ends(both, "late") == {(NUM_TOKENS, "length")}
    assert num_expired(both) == [number + 1 for number in before]
    assert {(s["owner"], s["lease_left_s"]) for s in states(both)} == {(None, None)}


def test_a_renewed_lease_does_not_expire_at_its_first_deadline(
    both: Together,
) -> None:
    before = num_expired(both)
    both.start(2, 1)
    pause(both, "in_place", SHORT_S)
    pause(both, "in_place", LONG_S)
    time.sleep(SHORT_S)
    assert are_paused(both) == {True}
    assert num_expired(both) == before


@pytest.mark.parametrize("early", range(NUM_ENGINES))
@pytest.mark.parametrize("mode", PauseMode)
def test_a_renewal_that_races_with_lease_expiry_takes_effect_on_both_engines(
    mixture: Together, mode: PauseMode, early: int
) -> None:
    """It came to the other engine before the end of its lease, and here after it."""
    before = num_expired(mixture)
    mixture.start(2, 1)
    mixture.let_end()
    pause(mixture, mode, LONG_S)
    arrive(mixture, "late")

    body = {"mode": mode, "lease_s": 60, "owner": OWNER}
    first = later(mixture, 1 - early, "pause", **body)
    run_out(mixture, early)
    renewed = [first, later(mixture, early, "pause", **body)]
    for reply in renewed:
        assert reply.result(timeout=60)["ok"]["num_aborted"] == 0
    for state in states(mixture):
        assert state["is_paused"] is True
        assert 30 < state["lease_left_s"] <= 60
    assert num_expired(mixture) == before
    asyncio.run(Control(mixture).resume(OWNER))
    mixture.finish()
    assert ends(mixture, "late") == {(NUM_TOKENS, "length")}


@pytest.mark.parametrize("early", range(NUM_ENGINES))
def test_continuing_as_a_lease_runs_out_lets_both_go_on(
    mixture: Together, early: int
) -> None:
    mixture.start(2, 1)
    pause(mixture, "in_place", LONG_S)
    run_out(mixture, early)
    answers = [later(mixture, rank, "resume") for rank in (1 - early, early)]
    assert all(not a.result(timeout=60)["ok"]["paused"] for a in answers)
    mixture.finish()
    assert set(mixture.ends.values()) == {"length"}


@pytest.mark.parametrize("early", range(NUM_ENGINES))
def test_a_commit_that_races_with_lease_expiry_leaves_no_engine_waiting(
    mixture: Together, early: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RETRY_S", SOON_S)
    mixture.start(2, 1)
    mixture.stage(1)
    pause(mixture, "in_place", LONG_S)
    first = later(mixture, 1 - early, "commit", weight_version="one")
    run_out(mixture, early)
    refused = first.result(timeout=60)["error"]
    assert refused["code"] == "engine_fault"
    assert "got different calls" in refused["message"]
    paused = [core.is_scheduler_paused() for core in mixture.cores]
    assert paused == [True, True], "one alone went on"
    mixture.ask(1 - early, end_lease)  # it is due there too
    until(lambda: are_paused(mixture) == {False}, "they did not go on")
    replies = mixture.control("commit", weight_version="one")
    assert [reply["ok"]["weight_version"] for reply in replies] == ["one", "one"]
    forwards = mixture.finish()
    assert all(a == b for a, b in zip(*forwards, strict=False))


def test_a_commit_is_rejected_while_a_continue_is_pending(
    mixture: Together,
) -> None:
    mixture.start(2, 1)
    mixture.let_end()
    mixture.stage(1)
    pause(mixture, "in_place", LONG_S)

    def both_at_once(core: Any) -> Any:
        return core.inflight("resume", {}), core.inflight("commit", {})

    asked = mixture.of_both(both_at_once)
    for going_on, commit in asked:
        assert going_on.result(timeout=60)["ok"]["paused"] is False
        assert commit["error"]["code"] == "wrong_phase"
        assert "about to continue" in commit["error"]["message"]
    mixture.control("abort")
    mixture.finish()
    assert set(mixture.ends.values()) == {"length"}


def test_a_continue_returns_at_once_on_an_engine_that_is_not_paused(
    mixture: Together,
) -> None:
    """A request has woken one of the engines, and the other one has not heard yet."""
    mixture.control("pause", mode="in_place")  # they have met
    mixture.control("resume")

    def begin(core: Any) -> None:
        add(core, "r0", prompt(0))
        core.engines_running = True

    mixture.ask(0, begin).result(timeout=60)
    idle = later(mixture, 1, "resume")
    assert idle.result(timeout=60)["ok"]["paused"] is False
    wave = EngineCoreRequestType.START_DP_WAVE, (mixture.cores[1].current_wave, 0)
    mixture.ask(1, lambda core: core._handle_client_request(*wave)).result(timeout=60)
    mixture.finish()
    assert (len(mixture.stamps["r0"]), mixture.ends["r0"]) == (NUM_TOKENS, "length")


def test_a_lease_that_ends_while_requests_drain_ends_the_pause(
    mixture: Together,
) -> None:
    mixture.start(2, 1)
    waiting = [
        later(mixture, rank, "pause", mode="wait", lease_s=SOON_S)
        for rank in range(NUM_ENGINES)
    ]
    arrive(mixture, "late")
    for each in waiting:
        assert each.result(timeout=60)["error"]["code"] == "pause_conflict"
    assert are_paused(mixture) == {False}
    assert not mixture.ends, "they ran to their end before"
    mixture.finish()
    assert ends(mixture, "late") == {(NUM_TOKENS, "length")}
