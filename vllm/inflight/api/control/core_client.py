"""How control calls reach the engine cores, from an event loop or blocking."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

from vllm.inflight import upstream
from vllm.inflight.calls import Call, call_to_dict
from vllm.inflight.engine.utility import inflight
from vllm.inflight.transport.waiting import in_background

T = TypeVar("T")
Reply = dict[str, Any]

ALIVE_S = 1.0
"""Interval at which a waiting call checks that its engine is alive."""

REST_S = 0.0005
"""Seconds that a thread sleeps between two slices of work."""


class CoreClient(Protocol):
    """How calls reach the engine cores."""

    @property
    def num_engines(self) -> int:
        """Number of engines that answer a call."""
        ...

    async def call(self, call: Call) -> list[Reply]:
        """The envelopes of every engine, in engine order."""
        ...

    async def rest(self) -> None:
        """Let other work of this process go on, between two slices of work."""
        ...


class AsyncCoreClient:
    """Calls engine cores in other processes, from an event loop."""

    def __init__(self, client: upstream.EngineCoreClient) -> None:
        self._client = client

    @property
    def num_engines(self) -> int:
        """Changes with elastic expert parallelism."""
        return len(self._client.core_engines)

    async def call(self, call: Call) -> list[Reply]:
        """One utility call per engine, at the same time.

        Raises:
            EngineDeadError: an engine has ended. Upstream does not fail waiting calls.

        """
        asking = asyncio.ensure_future(
            self._client.call_utility_all_async(
                inflight.__name__, call.name, call_to_dict(call)
            )
        )
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=ALIVE_S)
                if not asking.done():
                    self._client.ensure_alive()
            return list(asking.result())
        finally:
            asking.cancel()

    async def rest(self) -> None:
        """Let the other tasks of the event loop go on."""
        await asyncio.sleep(0)

    async def call_each(self, call: Call, patience_s: float) -> list[Reply]:
        """Call each engine by itself.

        The envelope of an engine without an answer within `patience_s` is an error.
        """
        asked = self._client.call_utility_each(
            inflight.__name__, call.name, call_to_dict(call)
        )
        waits = (asyncio.wait_for(each, patience_s) for each in asked)
        answers = await asyncio.gather(*waits, return_exceptions=True)
        return [
            {"error": {"message": repr(each)}}
            if isinstance(each, BaseException)
            else each
            for each in answers
        ]


class SyncCoreClient:
    """Calls the core of an `LLM`, in this process or in another one."""

    num_engines = 1

    def __init__(self, client: upstream.EngineCoreClient) -> None:
        self._client = client

    async def call(self, call: Call) -> list[Reply]:
        """Block until the answer is there; await nothing, so that `run_sync` works."""
        core = getattr(self._client, "engine_core", None)
        if core is None:
            return [self._elsewhere(call)]
        from vllm.inflight.engine.controller import Controller

        controller = Controller.of(core)
        answer = controller.step_queue.run(lambda: controller.call(call))
        # The monitor completes a Future, while steps go on.
        return [answer.result() if hasattr(answer, "result") else answer]

    async def rest(self) -> None:
        """Let other threads go on, such as the thread that generates."""
        time.sleep(REST_S)

    def _elsewhere(self, call: Call) -> Reply:
        """The answer of a core in another process.

        Raises:
            EngineDeadError: the core has ended. Upstream does not fail waiting calls.

        """
        # If the core has ended, the thread stays; it does not block the exit.
        answer: Future[Reply] = in_background(
            lambda: self._client.call_utility(
                inflight.__name__, call.name, call_to_dict(call)
            )
        )
        while not wait([answer], timeout=ALIVE_S).done:
            self._client.ensure_alive()
        return answer.result()


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing but other such coroutines."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call has awaited something")
