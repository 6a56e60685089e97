"""`/health`: whether the engine core still answers, and not only whether it lives.

Upstream answers 200 until the process of the core has died. Here each request for
`/health` sends a small call to the core. If the core has not answered for
`--inflight-health-s`, the reply is 503. The core answers between two steps, so the
limit has to be longer than any step.

A core without weights to decode with is healthy: it waits for an update. So is a core
whose live weights differ from the committed ones, as a scrub has found: the next update
repairs it. The reply is then 200 with a reason. It also says that a pause is absorbed.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vllm.inflight import upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.server.client_state import ClientState, HealthCheck
from vllm.inflight.calls import ReadHealth
from vllm.inflight.config import InflightConfig

logger = upstream.init_logger(__name__)

REASON_S = 0.2
"""Seconds that a reply waits for a reason."""


class Heartbeat:
    """The last time at which the engine cores behind one client answered."""

    def __init__(self, control: Control, limit_s: float) -> None:
        self._control = control
        self._limit_s = limit_s
        self._heard = time.monotonic()
        self._asked = self._heard
        self._question: asyncio.Task[None] | None = None
        self._details: dict[str, str] = {}

    async def check(self) -> None:
        """Call the cores; raise `EngineDeadError` if they do not answer in time.

        Returns at once if the cores have answered within the limit. Otherwise waits for
        the rest of the limit.
        """
        if self._question is None or self._question.done():
            self._asked = time.monotonic()
            self._question = asyncio.create_task(self._ask())
            # Upstream's own check reports a core that has died, at the next call.
            self._question.add_done_callback(lambda q: q.cancelled() or q.exception())
        now = time.monotonic()
        if now - self._heard < self._limit_s:
            return
        left = self._asked + self._limit_s - now
        done, _ = await asyncio.wait({self._question}, timeout=max(0.0, left))
        if not done:
            silent_s = time.monotonic() - self._heard
            logger.error("the engine core was last heard %.0f s ago", silent_s)
            raise upstream.EngineDeadError()
        self._question.result()

    async def details(self) -> dict[str, str]:
        """What is wrong with the weights, and whether a pause is absorbed."""
        if self._question is not None and not self._question.done():
            await asyncio.wait({self._question}, timeout=REASON_S)
        return self._details

    async def _ask(self) -> None:
        replies = await self._control.ask(ReadHealth())
        self._details = {
            name: detail
            for reply in reversed(replies)
            for name, detail in reply.items()
            if detail is not None
        }
        self._heard = time.monotonic()


def heartbeat_of(engine: upstream.EngineClient) -> HealthCheck | None:
    """The heartbeat of an `AsyncLLM`, made at the first call; None if it is off."""
    limit_s = InflightConfig.of(engine.vllm_config).health_s
    if not limit_s:
        return None
    state = ClientState.of(engine)
    if (found := state.heartbeat) is None:
        found = state.heartbeat = Heartbeat(control_of(engine), limit_s)
    return found


async def health(raw_request: Request) -> Response:
    """Upstream's reply, with what an operator has to know.

    The body then has `weights_detail`, `pause_detail` or both. Otherwise it is empty,
    as upstream's.
    """
    answer: Response = await upstream.health(raw_request)
    engine = raw_request.app.state.engine_client
    heartbeat = None if engine is None else heartbeat_of(engine)
    if answer.status_code != 200 or heartbeat is None:
        return answer
    details = await heartbeat.details()
    return JSONResponse(details) if details else answer
