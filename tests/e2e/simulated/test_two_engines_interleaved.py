"""Two engines of one front end: other calls come between the steps of a call."""

import asyncio
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import Loop
from tests.support.simulated.doors import Door, cancelled_and_over, publish, served
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.restore import restore
from vllm.inflight.errors import (
    EngineFault,
    InflightError,
    UpdateBusy,
    VersionConflict,
)


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
            with pytest.raises(UpdateBusy, match="the rollback to 'one' waits"):
                await Control(Door(cores)).start(transport="local")
            streams.step(60)
            return [first, second.result(timeout=30)]

    for number, label in enumerate(("one", "two"), 1):
        publish(Control(Door(cores)), number, label)
    add(cores[1], "r0", prompt(0))
    streams = Streams(cores[1]).step(3)
    asyncio.run(Control(Meanwhile(cores)).rollback(mode="wait"))
    assert served(cores) == [("one", 1)] * 2


@pytest.mark.parametrize("asked", ["may_start", "start"])
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
        await cancelled_and_over(updating)

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
            if method == "start":
                call(cores[busy], "start", update_id="another", transport="local")
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
                call(cores[1], "start", update_id="another", transport="local")
                call(cores[1], "prepare")
            return await super().call(method, body)

    control = Control(Meanwhile(cores))
    asyncio.run(control.start(update_id="mine", transport="local"))
    with pytest.raises(InflightError):
        asyncio.run(control.update({"weights": 1}))  # as upstream's clients, unnamed
    phases = [call(core, "status")["outcomes"][0] for core in cores]
    assert [each["phase"] for each in phases] == ["aborted", "staged"]


def test_a_version_committed_during_a_restore_does_not_get_its_label(
    cores: list[Any],
) -> None:
    noted = {"weight_version": "named", "model": "m", "recipe": [], "digest": None}

    class Meanwhile(Door):
        """A trainer commits once what is served has been looked at."""

        async def call(self, method: str, body: dict[str, Any]) -> list[Any]:
            if method == "journal":
                return [{"ok": {"path": "p", "model": "m", "found": noted}}] * 2
            if method == "rename":
                await asyncio.to_thread(publish, Control(Door(cores)), 1, "theirs")
            return await super().call(method, body)

    with pytest.raises(VersionConflict, match="the live version is 'theirs'"):
        asyncio.run(restore(Control(Meanwhile(cores))))
    assert served(cores) == [("theirs", 1)] * 2
