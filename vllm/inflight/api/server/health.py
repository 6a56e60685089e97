"""`/health`: whether the engine core still comes round, and not only whether it lives.

Upstream says 200 until the core's process has died. Here the core is asked something
small whenever somebody asks for its health, and once it has not answered for
`--inflight-health-s` the answer is 503. It reads what it is asked between two steps, so
a step that takes long is no illness as long as it is shorter than that.

A core that answers and decodes nothing, because its weights are not there, is well: it
waits for somebody to bring them. So is one that serves other weights than were
committed, as a scrub has found: a published version mends it. Then the answer is 200
with a reason.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vllm.inflight import upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.config import InflightConfig

logger = upstream.init_logger(__name__)

REASON_S = 0.2
"""How long an answer waits for the reason that may belong to it."""


class Heartbeat:
    """When the engine cores behind one client were heard last."""

    def __init__(self, control: Control, patience_s: float) -> None:
        self._control = control
        self._patience_s = patience_s
        self._heard = time.monotonic()
        self._asked = self._heard
        self._question: asyncio.Task[None] | None = None
        self._reason: str | None = None

    async def check(self) -> None:
        """Ask anew; raises `EngineDeadError` where that is not answered any more.

        Answers at once while the cores were heard within the patience, and else
        waits for what is left of it.
        """
        if self._question is None or self._question.done():
            self._asked = time.monotonic()
            self._question = asyncio.create_task(self._ask())
            # Of a core that dies meanwhile upstream's own check tells, the next time.
            self._question.add_done_callback(lambda q: q.cancelled() or q.exception())
        now = time.monotonic()
        if now - self._heard < self._patience_s:
            return
        left = self._asked + self._patience_s - now
        done, _ = await asyncio.wait({self._question}, timeout=max(0.0, left))
        if not done:
            silent_s = time.monotonic() - self._heard
            logger.error("the engine core was last heard %.0f s ago", silent_s)
            raise upstream.EngineDeadError()
        self._question.result()

    async def reason(self) -> str | None:
        """What is wrong with the weights of cores that answer; None if nothing is."""
        if self._question is not None and not self._question.done():
            await asyncio.wait({self._question}, timeout=REASON_S)
        return self._reason

    async def _ask(self) -> None:
        replies = await self._control.ask("health")
        reasons = (reply["weights_detail"] for reply in replies)
        self._reason = next(filter(None, reasons), None)
        self._heard = time.monotonic()


def heartbeat_of(engine: Any) -> Heartbeat | None:
    """The heartbeat of an `AsyncLLM`, made when it is first asked for; None if off."""
    patience_s = InflightConfig.of(engine.vllm_config).health_s
    if not patience_s:
        return None
    found: Heartbeat | None = getattr(engine, "_inflight_heartbeat", None)
    if found is None:
        found = engine._inflight_heartbeat = Heartbeat(control_of(engine), patience_s)
    return found


async def health(raw_request: Request) -> Response:
    """Upstream's answer; with the reason, if something is wrong with the weights.

    The body is then `{"weights_detail": …}`, and else empty as upstream's is.
    """
    answer: Response = await upstream.health(raw_request)
    engine = raw_request.app.state.engine_client
    heartbeat = None if engine is None else heartbeat_of(engine)
    if answer.status_code != 200 or heartbeat is None:
        return answer
    reason = await heartbeat.reason()
    return answer if reason is None else JSONResponse({"weights_detail": reason})
