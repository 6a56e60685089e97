"""Two engines of one front end: other calls come between the steps of a call."""

import asyncio
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, call, prompt
from tests.support.simulated.core import Loop
from tests.support.simulated.doors import Door, Slow, publish, served
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.restore import restore
from vllm.inflight.calls import (
    Call,
    CommitUpdate,
    ReadJournal,
    ReceiveChunk,
    RenameVersion,
    RollBack,
    StartUpdate,
    call_to_dict,
)
from vllm.inflight.errors import (
    EngineFault,
    InflightError,
    UpdateBusy,
    VersionConflict,
)


def test_no_update_starts_while_one_of_two_engines_has_yet_to_commit(
    cores: list[Any],
) -> None:
    class Meanwhile(Door):
        """One engine commits at once, the other after a trainer that tries again."""

        async def call(self, asked: Call) -> list[Any]:
            if not isinstance(asked, CommitUpdate):
                return await super().call(asked)
            first = cores[0].inflight("commit", call_to_dict(asked))
            with pytest.raises(UpdateBusy):
                await Control(Door(cores)).start(StartUpdate(transport="local"))
            return [first, cores[1].inflight("commit", call_to_dict(asked))]

    publish(Control(Door(cores)), 1, "one")
    cores[1].model_executor.refused = (2,)
    with pytest.raises(EngineFault, match="the test says so"):
        publish(Control(Meanwhile(cores)), 2, "two")
    assert served(cores) == [("one", 1)] * 2


@pytest.mark.parametrize("cores", [Loop], indirect=True)
def test_no_update_starts_while_one_of_two_engines_has_yet_to_roll_back(
    cores: list[Any],
) -> None:
    class Meanwhile(Door):
        """A trainer tries its luck once an engine waits, and the other one does not."""

        async def call(self, asked: Call) -> list[Any]:
            if not isinstance(asked, RollBack):
                return await super().call(asked)
            first, second = (
                core.inflight("rollback", call_to_dict(asked)) for core in cores
            )
            with pytest.raises(UpdateBusy, match="the rollback to 'one' waits"):
                await Control(Door(cores)).start(StartUpdate(transport="local"))
            streams.step(60)
            return [first, second.result(timeout=30)]

    for number, label in enumerate(("one", "two"), 1):
        publish(Control(Door(cores)), number, label)
    add(cores[1], "r0", prompt(0))
    streams = Streams(cores[1]).step(3)
    asyncio.run(Control(Meanwhile(cores)).rollback(mode="wait"))
    assert served(cores) == [("one", 1)] * 2


@pytest.mark.parametrize("name", ["may_start", "start"])
def test_a_one_call_update_cancelled_at_its_start_stays_active_on_no_engine(
    cores: list[Any], name: str
) -> None:
    async def update(control: Control) -> None:
        async with control.in_one_call(StartUpdate(transport="local")):
            raise AssertionError("it has not begun")

    Slow(cores, name).cancel(update)
    assert [call(core, "status")["active"] for core in cores] == [None, None]


@pytest.mark.parametrize("busy", [0, 1])
def test_a_start_repeated_after_one_engine_was_busy_stays_active_on_no_engine(
    cores: list[Any], busy: int
) -> None:
    class Late(Door):
        """Another update begins on one engine before this one does."""

        async def call(self, asked: Call) -> list[Any]:
            if isinstance(asked, StartUpdate):
                call(cores[busy], "start", update_id="another", transport="local")
            return await super().call(asked)

    control = Control(Door(cores))
    opening = {"update_id": "mine", "transport": "local"}
    with pytest.raises(UpdateBusy):
        asyncio.run(Control(Late(cores)).start(StartUpdate(**opening)))
    call(cores[busy], "abort", update_id="another")
    begun = asyncio.run(control.start(StartUpdate(**opening)))
    assert {each["phase"] for each in begun["engines"]} == {"aborted"}
    assert [call(core, "status")["active"] for core in cores] == [None, None]
    publish(control, 1, "one")
    assert served(cores) == [("one", 1)] * 2


def test_a_chunk_that_one_engine_rejects_aborts_only_its_own_update(
    cores: list[Any],
) -> None:
    class Meanwhile(Door):
        """One engine has ended its update, and begun another, before all answered."""

        async def call(self, asked: Call) -> list[Any]:
            if isinstance(asked, ReceiveChunk):
                call(cores[1], "abort")
                call(cores[1], "start", update_id="another", transport="local")
                call(cores[1], "prepare")
            return await super().call(asked)

    control = Control(Meanwhile(cores))
    asyncio.run(control.start(StartUpdate("mine", transport="local")))
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

        async def call(self, asked: Call) -> list[Any]:
            if isinstance(asked, ReadJournal):
                return [{"ok": {"path": "p", "model": "m", "found": noted}}] * 2
            if isinstance(asked, RenameVersion):
                await asyncio.to_thread(publish, Control(Door(cores)), 1, "theirs")
            return await super().call(asked)

    with pytest.raises(VersionConflict, match="the live version is 'theirs'"):
        asyncio.run(restore(Control(Meanwhile(cores))))
    assert served(cores) == [("theirs", 1)] * 2
