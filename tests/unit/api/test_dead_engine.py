"""A control call whose engine ends meanwhile ends too, as requests do."""

import asyncio
import threading
from typing import Any

import pytest

from vllm.inflight import upstream
from vllm.inflight.api.control import core_client
from vllm.inflight.calls import CommitUpdate


class Client:
    """Answers when it is told to; may die before."""

    def __init__(self) -> None:
        self.is_dead = False
        self.was_cancelled = False
        self.answer = asyncio.Event()

    async def call_utility_all_async(self, *_: Any) -> list[dict[str, Any]]:
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return [{"ok": {}}]

    def ensure_alive(self) -> None:
        if self.is_dead:
            raise upstream.EngineDeadError()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_client, "ALIVE_S", 0.01)


async def test_a_call_does_not_wait_for_an_engine_that_has_ended() -> None:
    client = Client()
    calling = asyncio.create_task(
        core_client.AsyncCoreClient(client).call(CommitUpdate())
    )
    await asyncio.sleep(0.1)
    assert not calling.done()
    client.is_dead = True
    with pytest.raises(upstream.EngineDeadError):
        await asyncio.wait_for(calling, 30)
    await asyncio.sleep(0)
    assert client.was_cancelled


async def test_a_call_waits_for_an_engine_that_takes_its_time() -> None:
    client = Client()
    calling = asyncio.create_task(
        core_client.AsyncCoreClient(client).call(CommitUpdate())
    )
    await asyncio.sleep(0.1)
    client.answer.set()
    assert await asyncio.wait_for(calling, 30) == [{"ok": {}}]


async def test_a_caller_that_is_gone_is_not_waited_for() -> None:
    client = Client()
    calling = asyncio.create_task(
        core_client.AsyncCoreClient(client).call(CommitUpdate())
    )
    await asyncio.sleep(0.1)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await asyncio.sleep(0)
    assert client.was_cancelled


class Blocking:
    """The same for `LLM`, whose calls block."""

    def __init__(self, *, is_dead: bool = False) -> None:
        self.is_dead = is_dead
        self.answer = threading.Event()

    def call_utility(self, *_: Any) -> dict[str, Any]:
        self.answer.wait()
        return {"ok": {}}

    def ensure_alive(self) -> None:
        if self.is_dead:
            raise upstream.EngineDeadError()


def test_a_call_that_blocks_does_not_wait_for_an_engine_that_has_ended() -> None:
    client = Blocking(is_dead=True)
    with pytest.raises(upstream.EngineDeadError):
        core_client.run_sync(core_client.SyncCoreClient(client).call(CommitUpdate()))
    client.answer.set()


def test_a_call_that_blocks_waits_for_an_engine_that_takes_its_time() -> None:
    client = Blocking()
    threading.Timer(0.1, client.answer.set).start()
    assert core_client.run_sync(
        core_client.SyncCoreClient(client).call(CommitUpdate())
    ) == [{"ok": {}}]


def test_an_error_of_a_call_that_blocks_is_its_callers() -> None:
    class Failing(Blocking):
        def call_utility(self, *_: Any) -> dict[str, Any]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        core_client.run_sync(core_client.SyncCoreClient(Failing()).call(CommitUpdate()))
