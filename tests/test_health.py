"""Health: a core that is slow is well, a core that does not answer is not."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm.inflight.api.control import Control
from vllm.inflight.api.health import Heartbeat, heartbeat_of

PATIENCE_S = 0.3


class Core:
    """Behind a door; answers while `is_well`, and what it was asked before then too."""

    def __init__(self) -> None:
        self.is_well = asyncio.Event()
        self.num_asked = 0

    async def call(self, method: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        self.num_asked += 1
        await self.is_well.wait()
        return [{"ok": {"is_paused": False}}]


async def took(heartbeat: Heartbeat) -> float:
    began = time.monotonic()
    await heartbeat.check()
    return time.monotonic() - began


async def test_a_core_that_was_heard_is_well_and_nobody_waits_for_its_answer():
    core = Core()
    heartbeat = Heartbeat(Control(core), PATIENCE_S)
    assert await took(heartbeat) < PATIENCE_S / 2
    core.is_well.set()


async def test_a_core_that_was_not_asked_for_long_is_asked_and_is_well():
    core = Core()
    core.is_well.set()
    heartbeat = Heartbeat(Control(core), PATIENCE_S)
    await asyncio.sleep(2 * PATIENCE_S)
    assert await took(heartbeat) < PATIENCE_S / 2
    assert core.num_asked == 1


async def test_a_core_that_answers_late_but_in_time_is_well():
    core = Core()
    heartbeat = Heartbeat(Control(core), PATIENCE_S)
    await asyncio.sleep(2 * PATIENCE_S)
    asyncio.get_running_loop().call_later(PATIENCE_S / 2, core.is_well.set)
    assert PATIENCE_S / 3 < await took(heartbeat) < PATIENCE_S


async def test_a_core_that_does_not_answer_is_given_up_until_it_does():
    core = Core()
    heartbeat = Heartbeat(Control(core), PATIENCE_S)
    await asyncio.sleep(2 * PATIENCE_S)
    for _ in range(3):  # whoever asks later does not wait again
        with pytest.raises(EngineDeadError):
            await heartbeat.check()
    assert core.num_asked == 1
    core.is_well.set()
    await asyncio.sleep(0.01)
    assert await took(heartbeat) < PATIENCE_S / 2


@pytest.mark.parametrize(("health_s", "is_on"), [(60.0, True), (0.0, False)])
async def test_zero_is_upstreams_behaviour(health_s: float, is_on: bool):
    extra = {"inflight": {"health_s": health_s}}
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=extra), engine_core=None
    )
    found = heartbeat_of(engine)
    assert (found is not None) == is_on
    assert found is heartbeat_of(engine), "there is one of each engine"
