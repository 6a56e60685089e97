"""Engines of the trainer's own process: an `LLM`, an `AsyncLLM` and its loop."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from tests.support.trainers.fake_engine import HELD_S, weights
from tests.support.waiting import until
from tests.unit.trainer.conftest import noted, stopped_at_once
from vllm.inflight.errors import (
    Cancelled,
    ConfigError,
    EngineUnreachable,
    NoTransport,
)
from vllm.inflight.trainer import Publisher, coordinator
from vllm.inflight.trainer.engine_clients import InProcessEngine
from vllm.inflight.trainer.retry import RetryBudget


class Sync:
    """Has the methods of an `LLM` that a publisher calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.refuses = False

    def start_weight_update(self, **body: Any) -> dict[str, Any]:
        if self.refuses:
            raise NoTransport("no weight transfer backend is configured")
        self.calls.append(("start", body))
        return {"update_id": body["update_id"], "phase": "staging"}

    def update_weights(
        self, request: dict[str, Any], update_id: str, chunk: int
    ) -> dict[str, Any]:
        self.calls.append(("update", (request, chunk)))
        return {"update_id": update_id, "phase": "staging"}

    def prepare_weight_update(self, update_id: str) -> dict[str, Any]:
        self.calls.append(("prepare", update_id))
        return {"update_id": update_id, "phase": "staged", "digest": "d", "sent": "s"}

    def finish_weight_update(
        self, *, update_id: str, mode: str | None = None
    ) -> dict[str, Any]:
        self.calls.append(("finish", mode))
        return {"weight_version": "v", "epoch": 1, "digest": "d", "gap_ms": 0.1}

    def abort_weight_update(self, update_id: str) -> dict[str, Any]:
        self.calls.append(("abort", update_id))
        return {"update_id": update_id, "phase": "aborted"}

    def weight_update_status(self, update_id: str | None) -> dict[str, Any]:
        assert update_id is None
        return {"active": None, "outcomes": []}


class Async:
    """The same as coroutines, as an `AsyncLLM` has them."""

    def __init__(self) -> None:
        self.inner = Sync()
        self.threads: set[str] = set()

    async def start_weight_update(self, **body: Any) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        await asyncio.sleep(0)
        return self.inner.start_weight_update(**body)

    async def update_weights(self, *args: Any, **ids: Any) -> dict[str, Any]:
        return self.inner.update_weights(*args, **ids)

    async def finish_weight_update(self, **body: Any) -> dict[str, Any]:
        return self.inner.finish_weight_update(**body)

    async def abort_weight_update(self, update_id: str) -> dict[str, Any]:
        return self.inner.abort_weight_update(update_id)


def test_an_llm_is_called_by_its_methods():
    llm = Sync()
    with Publisher(llm, weights()) as to:
        outcome = to.publish("v", step=1, mode="retract")
    assert [name for name, _ in llm.calls] == ["start", "update", "finish"]
    (request, chunk), mode = llm.calls[1][1], llm.calls[2][1]
    assert (request["update_info"].keys(), chunk, mode) == ({"shm"}, 0, "retract")
    assert (outcome.epochs, outcome.version) == ({"Sync": 1}, "v")


def test_an_error_of_an_llm_is_raised_with_the_name_of_the_llm_and_a_remedy():
    llm = Sync()
    llm.refuses = True
    with (
        Publisher(llm, weights()) as to,
        pytest.raises(NoTransport, match="Sync: ") as raised,
    ):
        to.publish()
    assert "--weight-transfer-config" in "".join(raised.value.__notes__)


def test_two_llms_get_distinct_names():
    llms = [Sync(), Sync()]
    with Publisher(llms, weights()) as to:
        assert to.publish().epochs == {"Sync 0": 1, "Sync 1": 1}
    for llm in llms:
        assert [name for name, _ in llm.calls][-2:] == ["prepare", "finish"]


async def test_an_async_llm_is_called_on_its_own_loop():
    engine = Async()
    with Publisher(engine, weights()) as to:
        outcome = await asyncio.to_thread(to.publish, "v")
    assert outcome.epoch == 1
    assert engine.threads == {threading.current_thread().name}


async def test_a_finish_that_is_not_waited_for_goes_on_to_its_end(monkeypatch):
    """Several engines behind one `AsyncLLM` are taken back there, if need be."""
    aborted, ended = asyncio.Event(), []

    class Slow(Async):
        async def finish_weight_update(self, **body: Any) -> dict[str, Any]:
            await aborted.wait()
            ended.append("taken back")
            return self.inner.finish_weight_update(**body)

        async def abort_weight_update(self, update_id: str) -> dict[str, Any]:
            aborted.set()
            return self.inner.abort_weight_update(update_id)

    finish = InProcessEngine.finish
    monkeypatch.setattr(
        InProcessEngine,
        "finish",
        lambda self, body, _: finish(self, body, RetryBudget(0.1)),
    )
    with (
        Publisher(Slow(), weights(), timeout_s=20) as to,
        pytest.raises(EngineUnreachable, match="finish_weight_update"),
    ):
        await asyncio.to_thread(to.publish)
    assert ended == ["taken back"]


async def test_a_future_of_a_publish_can_be_awaited():
    with Publisher(Async(), weights()) as to:
        future = await asyncio.to_thread(to.publish, block=False)
        assert (await asyncio.wrap_future(future)).epoch == 1


async def test_a_publish_that_would_block_the_engines_loop_is_rejected():
    engine = Async()
    with Publisher(engine, weights()) as to:
        with pytest.raises(RuntimeError, match=r"block=False.*asyncio\.to_thread"):
            to.publish()
        assert engine.inner.calls == []


async def test_a_publish_that_does_not_block_may_be_made_on_the_engines_loop():
    with Publisher(Async(), weights()) as to:
        future = to.publish(block=False)
        assert (await asyncio.wrap_future(future)).epoch == 1


async def test_a_third_publish_is_rejected_on_the_engines_loop_if_it_would_wait():
    release = asyncio.Event()

    class Slow(Async):
        async def update_weights(self, *args: Any, **ids: Any) -> dict[str, Any]:
            await release.wait()
            return self.inner.update_weights(*args, **ids)

    with Publisher(Slow(), weights()) as to:
        first = to.publish(block=False)
        await asyncio.to_thread(until, lambda: to._queue._waiting is None)
        second = to.publish(block=False)
        with pytest.raises(RuntimeError, match="would block the engine's event loop"):
            to.publish(block=False)
        with pytest.raises(RuntimeError, match=r"close\(\) would block"):
            to.close()
        release.set()
        for future in (first, second):
            assert (await asyncio.wrap_future(future)).epoch == 1


async def test_an_exception_on_the_engines_loop_cancels_the_publish_without_blocking():
    class Stuck(Async):
        async def update_weights(self, *args: Any, **ids: Any) -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError

    engine = Stuck()
    with pytest.raises(KeyError), Publisher(engine, weights()) as to:
        future = to.publish(block=False)
        while not engine.inner.calls:
            await asyncio.sleep(0.01)
        raise KeyError
    with pytest.raises(Cancelled):
        await asyncio.wait_for(asyncio.wrap_future(future), 60)
    assert engine.inner.calls[-1][0] == "abort"


def test_an_llm_that_does_not_come_back_is_not_waited_for_longer_than_said(monkeypatch):
    looks = noted(monkeypatch, RetryBudget, "overdue_s")
    release = threading.Event()

    class Stuck(Sync):
        def update_weights(self, *args: Any, **ids: Any) -> dict[str, Any]:
            release.wait(HELD_S)
            return {}

    llm = Stuck()
    began = time.monotonic()
    with (
        Publisher(llm, weights(), timeout_s=1) as to,
        pytest.raises(EngineUnreachable, match="no answer within 1 s"),
    ):
        to.publish()
    assert stopped_at_once(looks, 0.5)
    assert time.monotonic() - began < HELD_S
    assert llm.calls[-1][0] == "abort"
    release.set()


async def test_the_loop_may_be_given_from_another_thread():
    loop = asyncio.get_running_loop()

    def train() -> int | None:
        with Publisher(Async(), weights(), loop=loop) as to:
            return to.publish().epoch

    assert await asyncio.to_thread(train) == 1


def test_an_async_llm_without_a_loop_is_rejected():
    with pytest.raises(ConfigError, match="loop="):
        Publisher(Async(), weights())


def test_a_publish_to_a_loop_that_does_not_run_fails_at_the_timeout(monkeypatch):
    monkeypatch.setattr(coordinator, "SLACK_S", 30)  # the calls end by themselves
    loop = asyncio.new_event_loop()
    with (
        Publisher(Async(), weights(), loop=loop, timeout_s=0.2) as to,
        pytest.raises(EngineUnreachable, match="loop running"),
    ):
        to.publish()
    # What was handed to it must still be run, or it is never awaited.
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
