"""Two engines behind one door, as data-parallel ones are."""

import asyncio
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
