"""Two engines behind one door: a commit that one of them cannot make is no commit."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.engine.bare_core import Streams, add, call, prompt
from tests.simulated.core import Loop, simulated_core
from tests.simulated.worker import SimulatedExecutor
from vllm.inflight.api.control import Control
from vllm.inflight.errors import EngineFault, InflightError, PauseConflict, UpdateBusy


class Failing(SimulatedExecutor):
    """Refuses the flips whose numbers it has been given."""

    refused: tuple[int, ...] = ()
    num_flips = 0

    def _inflight_flip(self, ranks: Any = None) -> Any:
        self.num_flips += 1
        if self.num_flips in self.refused:
            return {"error": "the test says so"}
        return super()._inflight_flip(ranks)


class Door:
    """To both cores, one after the other."""

    def __init__(self, cores: list[Any]) -> None:
        self._cores = cores
        self.num_engines = len(cores)

    async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
        answers = [core.inflight(method, dict(body)) for core in self._cores]
        return [a.result(timeout=30) if isinstance(a, Future) else a for a in answers]


@pytest.fixture
def cores(model: Path, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    kind = getattr(request, "param", EngineCore)
    made = [simulated_core(model, Failing, kind=kind) for _ in range(2)]
    yield made
    for core in made:
        core.shutdown()


def publish(control: Control, weights: int, label: str) -> Any:
    async def phases() -> Any:
        started = await control.start(transport="local")
        await control.update({"weights": weights}, started["update_id"])
        return await control.finish(label, update_id=started["update_id"])

    return asyncio.run(phases())


def served(cores: list[Any]) -> list[tuple[str, int]]:
    return [
        (core.inflight_gate.version.label, core.model_executor.live) for core in cores
    ]


@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_cannot_commit_the_other_goes_back_and_the_next_update_works(
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


def test_one_that_cannot_go_back_is_named(cores: list[Any]) -> None:
    control = Control(Door(cores))
    publish(control, 1, "one")
    cores[1].model_executor.refused = (2,)
    cores[0].model_executor.refused = (3,)
    with pytest.raises(EngineFault, match=r"engines \[0\] of 2 serve the new version"):
        publish(control, 2, "two")
    assert served(cores) == [("two", 2), ("one", 1)]
    publish(control, 3, "three")
    assert served(cores) == [("three", 3)] * 2


def test_while_one_has_yet_to_commit_another_update_leaves_the_way_back(
    cores: list[Any],
) -> None:
    class Meanwhile(Door):
        """One engine commits at once, the other after a trainer that tries again."""

        async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
            if method != "commit":
                return await super().call(method, body)
            first = cores[0].inflight("commit", dict(body))
            with pytest.raises(UpdateBusy):
                await Control(Door(cores)).start(transport="local")
            return [first, cores[1].inflight("commit", dict(body))]

    publish(Control(Door(cores)), 1, "one")
    cores[1].model_executor.refused = (2,)
    with pytest.raises(EngineFault, match="the test says so"):
        publish(Control(Meanwhile(cores)), 2, "two")
    assert served(cores) == [("one", 1)] * 2


@pytest.mark.parametrize("cores", [Loop], indirect=True)
def test_while_one_has_yet_to_roll_back_no_update_comes_in_between(
    cores: list[Any],
) -> None:
    class Meanwhile(Door):
        """A trainer tries its luck once an engine waits, and the other one does not."""

        async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
            if method != "rollback":
                return await super().call(method, body)
            first, second = (core.inflight("rollback", dict(body)) for core in cores)
            with pytest.raises(UpdateBusy, match="a rollback waits"):
                await Control(Door(cores)).start(transport="local")
            streams.step(60)
            return [first, second.result(timeout=30)]

    for number, label in enumerate(("one", "two"), 1):
        publish(Control(Door(cores)), number, label)
    add(cores[1], "r0", prompt(0))
    streams = Streams(cores[1]).step(3)
    asyncio.run(Control(Meanwhile(cores)).rollback(mode="wait"))
    assert served(cores) == [("one", 1)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_if_one_cannot_roll_back_the_other_goes_forth_again(
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


def test_one_that_cannot_go_forth_again_is_named(cores: list[Any]) -> None:
    control = Control(Door(cores))
    publish(control, 1, "one")
    publish(control, 2, "two")
    cores[0].model_executor.refused = (4,)
    cores[1].model_executor.refused = (3,)
    with pytest.raises(EngineFault, match=r"engines \[0\] of 2 serve the version befo"):
        asyncio.run(control.rollback())
    assert served(cores) == [("one", 1), ("two", 2)]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_commit_that_its_caller_cancels_is_made_on_both_or_on_none(
    cores: list[Any], failing: int
) -> None:
    class Pausing(Door):
        """Whoever waits for a commit is cancelled when the engines have made it."""

        async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
            answers = await super().call(method, body)
            if method == "commit":
                committing.cancel()
                await asyncio.sleep(0)
            return answers

    control = Control(Pausing(cores))
    publish(Control(Door(cores)), 1, "one")
    cores[failing].model_executor.refused = (2,)

    async def phases() -> None:
        nonlocal committing
        begun = await control.start(transport="local")
        await control.update({"weights": 2}, begun["update_id"])
        committing = asyncio.create_task(
            control.finish("two", update_id=begun["update_id"])
        )
        with pytest.raises(asyncio.CancelledError):
            await committing
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    committing: asyncio.Task[Any]
    asyncio.run(phases())
    assert served(cores) == [("one", 1)] * 2
    publish(Control(Door(cores)), 3, "three")
    assert served(cores) == [("three", 3)] * 2


@pytest.mark.parametrize("asked", ["may_begin", "begin"])
def test_an_update_in_one_call_that_is_cancelled_as_it_begins_is_under_way_on_none(
    cores: list[Any], asked: str
) -> None:
    class Slow(Door):
        """Whoever waits for an answer is cancelled before it is there."""

        async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
            answers = await super().call(method, body)
            if method == asked:
                updating.cancel()
                for _ in range(9):
                    await asyncio.sleep(0)
            return answers

    async def update() -> None:
        async with Control(Slow(cores)).in_one_call(transport="local"):
            raise AssertionError("it has not begun")

    async def cancelled() -> None:
        nonlocal updating
        updating = asyncio.create_task(update())
        with pytest.raises(asyncio.CancelledError):
            await updating
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    updating: asyncio.Task[Any]
    asyncio.run(cancelled())
    assert [call(core, "status")["active"] for core in cores] == [None, None]


@pytest.mark.parametrize("busy", [0, 1])
def test_a_start_repeated_after_one_was_busy_is_under_way_on_none(
    cores: list[Any], busy: int
) -> None:
    class Late(Door):
        """Another update begins on one engine before this one does."""

        async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
            if method == "begin":
                call(cores[busy], "begin", update_id="another", transport="local")
            return await super().call(method, body)

    control = Control(Door(cores))
    opening = {"update_id": "mine", "transport": "local"}
    with pytest.raises(UpdateBusy):
        asyncio.run(Control(Late(cores)).start(**opening))
    call(cores[busy], "abort", update_id="another")
    begun = asyncio.run(control.start(**opening))
    assert {each["phase"] for each in begun["engines"]} == {"aborted"}
    assert [call(core, "status")["active"] for core in cores] == [None, None]
    publish(control, 1, "one")
    assert served(cores) == [("one", 1)] * 2


def test_a_chunk_that_one_refuses_ends_no_update_but_its_own(cores: list[Any]) -> None:
    class Meanwhile(Door):
        """One engine has ended its update, and begun another, before all answered."""

        async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
            if method == "receive":
                call(cores[1], "abort")
                call(cores[1], "begin", update_id="another", transport="local")
                call(cores[1], "seal")
            return await super().call(method, body)

    control = Control(Meanwhile(cores))
    asyncio.run(control.start(update_id="mine", transport="local"))
    with pytest.raises(InflightError):
        asyncio.run(control.update({"weights": 1}))  # as upstream's clients, unnamed
    phases = [call(core, "status")["outcomes"][0] for core in cores]
    assert [each["phase"] for each in phases] == ["aborted", "staged"]


def test_a_pause_that_one_refuses_pauses_none(cores: list[Any]) -> None:
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
def test_a_pause_that_one_fails_in_is_taken_back_unless_there_was_one_before(
    cores: list[Any], monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    control = Control(Door(cores))
    if mode is not None:
        asyncio.run(control.pause(mode, owner="trainer"))

    def fail() -> None:
        raise EngineFault("the test says so")

    monkeypatch.setattr(cores[1].scheduler, "inflight_retract", fail)
    with pytest.raises(EngineFault, match="the test says so"):
        asyncio.run(control.pause("retract", owner="trainer"))
    states = [core.inflight("paused", {})["ok"] for core in cores]
    assert {state["is_paused"] for state in states} == {mode is not None}
