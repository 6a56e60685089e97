"""`/metrics`: upstream's, and those of weight updates behind them."""

from __future__ import annotations

import asyncio

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vllm.inflight import upstream
from vllm.inflight.api.methods import control_of
from vllm.inflight.outputs.metrics import exposition

PATIENCE_S = 2.0
"""An engine that does not answer by then is left out: the rest is told anyway."""

logger = upstream.init_logger(__name__)


async def metrics(request: Request) -> Response:
    """Everything in Prometheus' text form; needs no key, as upstream's does not."""
    text = generate_latest(upstream.get_prometheus_registry())
    control = control_of(request.app.state.engine_client)
    try:
        engines = await asyncio.wait_for(control.ask("metrics"), PATIENCE_S)
    except Exception as error:
        logger.warning("the engines did not tell their metrics: %r", error)
    else:
        text += exposition(engines)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
