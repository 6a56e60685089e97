"""Two engines of one front end: they commit together, or not at all."""

import asyncio
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, prompt
from tests.support.simulated.doors import Door, cancelled_and_over, publish, served
from vllm.inflight.api.control.control import Control
from vllm.inflight.calls import Call, CommitUpdate, StartUpdate
from vllm.inflight.errors import EngineFault, PauseConflict


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_commit_on_one_engine_is_rolled_back_on_the_other(
    cores: list[Any], failing: int
) -> None:
    control = Control(Door(cores))
    publish(control, 1, "one")
    cores[failing].model_executor.refused = (2,)
    with pytest.raises(EngineFault, match="the test says so"):
        publish(control, 2, "two")
    assert served(cores) == [("one", 1)] * 2
    publish(control, 3, "three")
    assert served(cores) == [("three", 3)] * 2


def test_an_engine_that_cannot_undo_its_commit_is_named(cores: list[Any]) -> None:
    control = Control(Door(cores))
    publish(control, 1, "one")
    cores[1].model_executor.refused = (2,)
    cores[0].model_executor.refused = (3,)
    with pytest.raises(EngineFault, match=r"engines \[0\] of 2 serve the new version"):
        publish(control, 2, "two")
    assert served(cores) == [("two", 2), ("one", 1)]
    publish(control, 3, "three")
    assert served(cores) == [("three", 3)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_rollback_on_one_engine_is_undone_on_the_other(
    cores: list[Any], failing: int
) -> None:
    control = Control(Door(cores))
    publish(control, 1, "the same")
    publish(control, 2, "the same")
    cores[failing].model_executor.refused = (3,)
    with pytest.raises(EngineFault, match="the test says so"):
        asyncio.run(control.rollback())
    assert served(cores) == [("the same", 2)] * 2
    asyncio.run(control.rollback())
    assert served(cores) == [("the same", 1)] * 2


def test_an_engine_that_cannot_undo_its_rollback_is_named(cores: list[Any]) -> None:
    control = Control(Door(cores))
    publish(control, 1, "one")
    publish(control, 2, "two")
    cores[0].model_executor.refused = (4,)
    cores[1].model_executor.refused = (3,)
    with pytest.raises(EngineFault, match=r"engines \[0\] of 2 serve the version befo"):
        asyncio.run(control.rollback())
    assert served(cores) == [("one", 1), ("two", 2)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_cancelled_commit_takes_effect_on_both_engines_or_on_neither(
    cores: list[Any], failing: int
) -> None:
    class Pausing(Door):
        """Whoever waits for a commit is cancelled when the engines have made it."""

        async def call(self, asked: Call) -> list[Any]:
            answers = await super().call(asked)
            if isinstance(asked, CommitUpdate):
                committing.cancel()
                await asyncio.sleep(0)
            return answers

    control = Control(Pausing(cores))
    publish(Control(Door(cores)), 1, "one")
    cores[failing].model_executor.refused = (2,)

    async def phases() -> None:
        nonlocal committing
        begun = await control.start(StartUpdate(transport="local"))
        await control.update({"weights": 2}, begun["update_id"])
        committing = asyncio.create_task(
            control.finish("two", update_id=begun["update_id"])
        )
        await cancelled_and_over(committing)

    committing: asyncio.Task[Any]
    asyncio.run(phases())
    assert served(cores) == [("one", 1)] * 2
    publish(Control(Door(cores)), 3, "three")
    assert served(cores) == [("three", 3)] * 2


def test_a_failed_commit_that_two_callers_asked_for_is_undone_once(
    cores: list[Any],
) -> None:
    """As when a reply was lost, and what asks again finds another API server."""
    publish(Control(Door(cores)), 1, "one")
    cores[1].model_executor.refused = (2, 3)
    told: list[str] = []

    async def finish(control: Control, update_id: str) -> None:
        with pytest.raises(EngineFault) as refusal:
            await control.finish("two", update_id=update_id)
        told.append(refusal.value.message)

    class Twice(Door):
        """Before the first goes on after its commit, the second has come and gone."""

        has_asked = False

        async def call(self, asked: Call) -> list[Any]:
            answers = await super().call(asked)
            if isinstance(asked, CommitUpdate) and not self.has_asked:
                self.has_asked = True
                await finish(Control(Door(cores)), asked.update_id)
            return answers

    async def phases() -> None:
        control = Control(Twice(cores))
        begun = await control.start(StartUpdate(transport="local"))
        await control.update({"weights": 2}, begun["update_id"])
        await finish(control, begun["update_id"])

    asyncio.run(phases())
    assert len(told) == 2
    assert all("the test says so" in each for each in told)
    assert served(cores) == [("one", 1)] * 2
    publish(Control(Door(cores)), 3, "three")
    assert served(cores) == [("three", 3)] * 2


def test_a_pause_that_one_engine_rejects_pauses_no_engine(cores: list[Any]) -> None:
    control = Control(Door(cores))
    add(cores[1], "r0", prompt(0))
    streams = Streams(cores[1]).step(3)
    with pytest.raises(PauseConflict, match="stay in place"):
        asyncio.run(control.pause("in_place", flush_cache=True, lease_s=60))
    states = [core.inflight("paused", {})["ok"] for core in cores]
    assert [state["is_paused"] for state in states] == [False, False]
    assert [state["lease_left_s"] for state in states] == [None, None]
    streams.run()


@pytest.mark.parametrize("mode", [None, "wait"])
def test_a_pause_that_fails_on_one_engine_restores_the_state_before(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    control = Control(Door(cores))
    if mode is not None:
        asyncio.run(control.pause(mode, owner="trainer"))

    def fail(**_: object) -> None:
        raise EngineFault("the test says so")

    monkeypatch.setattr(cores[1].scheduler.vllm_inflight, "retract", fail)
    with pytest.raises(EngineFault, match="the test says so"):
        asyncio.run(control.pause("retract", owner="trainer"))
    states = [core.inflight("paused", {})["ok"] for core in cores]
    assert {state["is_paused"] for state in states} == {mode is not None}
