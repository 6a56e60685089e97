"""Two engines behind one door, as data-parallel ones are."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from tests.support.simulated.worker import SimulatedExecutor
from vllm.inflight.api.control.control import Control
from vllm.inflight.calls import Call, StartUpdate, call_to_dict


class Failing(SimulatedExecutor):
    """Refuses the flips whose numbers it has been given."""

    refused: tuple[int, ...] = ()
    num_flips = 0

    def _inflight_flip(self, *args: Any) -> Any:
        self.num_flips += 1
        if self.num_flips in self.refused:
            return {"error": "the test says so"}
        return super()._inflight_flip(*args)


class Door:
    """To both cores, one after the other."""

    def __init__(self, cores: list[Any]) -> None:
        self._cores = cores
        self.num_engines = len(cores)

    async def call(self, asked: Call) -> list[Any]:
        answers = [
            core.inflight(asked.name, call_to_dict(asked)) for core in self._cores
        ]
        return [a.result(timeout=30) if isinstance(a, Future) else a for a in answers]


class Slow(Door):
    """The caller of an update is cancelled at one call, before its answer is there.

    Args:
        cores: of the engines.
        name: of that call.

    """

    def __init__(self, cores: list[Any], name: str) -> None:
        super().__init__(cores)
        self._name = name
        self._updating: asyncio.Task[Any] | None = None

    async def call(self, asked: Call) -> list[Any]:
        answers = await super().call(asked)
        if asked.name == self._name:
            assert self._updating is not None
            self._updating.cancel()
            for _ in range(9):
                await asyncio.sleep(0)
        return answers

    def cancel(self, update: Callable[[Control], Coroutine[Any, Any, Any]]) -> None:
        """Run an update until that call, and what goes on without its caller."""

        async def cancelled() -> None:
            self._updating = asyncio.create_task(update(Control(self)))
            await cancelled_and_over(self._updating)

        asyncio.run(cancelled())


def publish(control: Control, weights: int, label: str) -> Any:
    async def phases() -> Any:
        started = await control.start(StartUpdate(transport="local"))
        await control.update({"weights": weights}, started["update_id"])
        return await control.finish(label, update_id=started["update_id"])

    return asyncio.run(phases())


def served(cores: list[Any]) -> list[tuple[str, int]]:
    return [
        (core.vllm_inflight.version.label, core.model_executor.live) for core in cores
    ]


async def cancelled_and_over(call: asyncio.Task[Any]) -> None:
    """Wait for a call that its caller gives up, and for what goes on without it."""
    with pytest.raises(asyncio.CancelledError):
        await call
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
