"""Health: a core that is slow is well, a core that does not answer is not."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Response
from vllm.v1.engine.exceptions import EngineDeadError

from vllm.inflight.api.control.control import Control
from vllm.inflight.api.server import health
from vllm.inflight.api.server.client_state import ClientState
from vllm.inflight.api.server.health import Heartbeat, heartbeat_of
from vllm.inflight.calls import Call

PATIENCE_S = 60.0
"""Nothing here lasts that long: what has waited for its end is seen."""
NUM_TURNS = 20
"""Of the loop; any answer has come round after them."""

CONFIG = SimpleNamespace(additional_config={"inflight": {"health_s": PATIENCE_S}})


class Core:
    """Behind a door; answers while `is_well`, and what it was asked before then too."""

    def __init__(self) -> None:
        self.is_well = asyncio.Event()
        self.num_asked = 0
        self.detail: str | None = None
        self.pause: str | None = None

    async def call(self, _: Call) -> list[dict[str, Any]]:
        self.num_asked += 1
        await self.is_well.wait()
        return [{"ok": {"weights_detail": self.detail, "pause_detail": self.pause}}]


async def turns() -> None:
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


async def answers_at_once(heartbeat: Heartbeat) -> None:
    checking = asyncio.create_task(heartbeat.check())
    await turns()
    assert checking.done()
    checking.result()


def silent(core: Core, patience_s: float = PATIENCE_S) -> Heartbeat:
    """Of a core that was heard last when patience would have ended long since."""
    heartbeat = Heartbeat(Control(core), patience_s)
    heartbeat._heard -= 2 * patience_s
    return heartbeat


async def test_a_core_that_reported_recently_is_healthy_without_a_wait():
    core = Core()
    await answers_at_once(Heartbeat(Control(core), PATIENCE_S))
    core.is_well.set()


async def test_a_core_that_was_not_asked_for_long_is_asked_and_is_well():
    core = Core()
    core.is_well.set()
    await answers_at_once(silent(core))
    assert core.num_asked == 1


async def test_a_core_that_answers_late_but_in_time_is_well():
    core = Core()
    checking = asyncio.create_task(silent(core).check())
    await turns()
    assert not checking.done()
    core.is_well.set()
    await turns()
    assert checking.done()
    checking.result()


async def test_a_core_that_does_not_answer_is_unhealthy_until_it_answers():
    core = Core()
    heartbeat = silent(core, 0.1)
    with pytest.raises(EngineDeadError):
        await heartbeat.check()
    for _ in range(2):  # whoever asks later does not wait again
        with pytest.raises(EngineDeadError):
            await answers_at_once(heartbeat)
    assert core.num_asked == 1
    core.is_well.set()
    await turns()
    heartbeat._patience_s = PATIENCE_S  # the short one might end meanwhile
    await answers_at_once(heartbeat)


@pytest.mark.parametrize(("health_s", "is_on"), [(60.0, True), (0.0, False)])
async def test_a_health_limit_of_zero_keeps_upstreams_health_check(
    health_s: float, is_on: bool
):
    extra = {"inflight": {"health_s": health_s}}
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=extra), engine_core=None
    )
    found = heartbeat_of(engine)
    assert (found is not None) == is_on
    assert found is heartbeat_of(engine), "there is one of each engine"


async def test_weights_that_differ_are_a_detail_of_a_healthy_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def upstreams(request: Any) -> Any:
        return Response(status_code=200)

    monkeypatch.setattr(health.upstream, "health", upstreams)
    core = Core()
    core.is_well.set()
    beat = Heartbeat(Control(core), PATIENCE_S)
    engine = SimpleNamespace(
        vllm_inflight=ClientState(heartbeat=beat), vllm_config=CONFIG
    )
    request: Any = SimpleNamespace(
        app=SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    )
    for detail in (None, "model.norm.weight is not what was committed", None):
        core.detail = detail
        await beat.check()
        await turns()
        reply = await health.health(request)
        assert reply.status_code == 200
        told = json.loads(reply.body)["weights_detail"] if reply.body else None
        assert told == detail
    core.pause = "a pause is absorbed"
    await beat.check()
    await turns()
    reply = await health.health(request)
    assert json.loads(reply.body) == {"pause_detail": "a pause is absorbed"}
