"""`/metrics`: upstream's, and those of weight updates behind them."""

from __future__ import annotations

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vllm.inflight import upstream
from vllm.inflight.api.door import AsyncDoor
from vllm.inflight.outputs.metrics import exposition

PATIENCE_S = 2.0
"""An engine that does not answer by then is left out: the rest is told anyway."""

logger = upstream.init_logger(__name__)


async def metrics(request: Request) -> Response:
    """Everything in Prometheus' text form; needs no key, as upstream's does not."""
    text = generate_latest(upstream.get_prometheus_registry())
    door = AsyncDoor(request.app.state.engine_client.engine_core)
    told = {}
    for number, answer in enumerate(await door.call_each("metrics", {}, PATIENCE_S)):
        if "error" in answer:
            why = answer["error"]["message"]
            logger.warning("engine %d did not tell its metrics: %s", number, why)
        else:
            told[number] = answer["ok"]
    text += exposition(told)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
