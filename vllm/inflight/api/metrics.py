"""`/metrics`: upstream's, and those of weight updates behind them.

It needs no key, as upstream's does not, and each answer of the engines costs a turn of
their main loops. So scrapes that come while one is under way share its answer, and
those that come soon after it have the same.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vllm.inflight import upstream
from vllm.inflight.api.door import AsyncDoor
from vllm.inflight.outputs.metrics import exposition

PATIENCE_S = 2.0
"""An engine that does not answer by then is left out: the rest is told anyway."""

FRESH_S = 0.1
"""For how long an answer is told again, less than any scraper's interval."""

logger = upstream.init_logger(__name__)


class Scrapes:
    """What the engine cores behind one client tell of themselves."""

    def __init__(self, engine_core: Any) -> None:
        self._door = AsyncDoor(engine_core)
        self._question: asyncio.Task[bytes] | None = None
        self._text, self._stale_at = b"", 0.0

    async def text(self) -> bytes:
        """The metrics of weight updates, at most `FRESH_S` old when they are asked for.

        The engines are asked once for all that wait for it.
        """
        if time.monotonic() < self._stale_at:
            return self._text
        if self._question is None:
            self._question = asyncio.create_task(self._ask())
            self._question.add_done_callback(self._answered)
        # One scraper that goes away takes nothing from the others.
        return await asyncio.shield(self._question)

    def _answered(self, question: asyncio.Task[bytes]) -> None:
        self._question = None
        if not question.cancelled() and question.exception() is None:
            self._text = question.result()
            self._stale_at = time.monotonic() + FRESH_S

    async def _ask(self) -> bytes:
        told = {}
        answers = await self._door.call_each("metrics", {}, PATIENCE_S)
        for number, answer in enumerate(answers):
            if "error" in answer:
                why = answer["error"]["message"]
                logger.warning("engine %d did not tell its metrics: %s", number, why)
            else:
                told[number] = answer["ok"]
        return exposition(told)


async def metrics(request: Request) -> Response:
    """Everything in Prometheus' text form."""
    engine = request.app.state.engine_client
    found: Scrapes | None = getattr(engine, "_inflight_scrapes", None)
    if found is None:
        found = engine._inflight_scrapes = Scrapes(engine.engine_core)
    text = generate_latest(upstream.get_prometheus_registry()) + await found.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)
