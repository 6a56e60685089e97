"""`/health_generate`, `/v1/loads` and `/get_load`: SGLang's reads of a busy engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from vllm.inflight import upstream
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.request.fields import Fields
from vllm.inflight.api.server.client_state import ClientState
from vllm.inflight.calls import CountRequests
from vllm.inflight.errors import InflightError, Malformed
from vllm.inflight.releases.table import installed

HEALTH_LIMIT_S = 20.0
"""SGLang's default: seconds in which a token has to come."""

logger = upstream.init_logger(__name__)


async def health_generate(request: Request, _: dict[str, Any]) -> Response:
    """Whether the engine decodes: an idle engine has to generate a token."""
    engine = request.app.state.engine_client
    try:
        await engine.check_health()
        found = await asyncio.wait_for(_decodes(engine), HEALTH_LIMIT_S)
    except (InflightError, upstream.EngineDeadError, TimeoutError) as error:
        logger.warning("/health_generate: %r", error)
        return Response(status_code=503)
    return JSONResponse(found) if found else Response(status_code=200)


async def _decodes(engine: upstream.EngineClient) -> dict[str, Any]:
    """Find out whether the engine decodes; the reply says if it need not.

    A core answers between two steps. So one that answers while requests run does
    decode. A paused engine generates nothing, and is healthy.
    """
    control = control_of(engine)
    states = await control.ask(CountRequests())
    if any(state["paused"] for state in states):
        return {"detail": "the engine is paused"}
    if (reason := (await control.info())["weights_detail"]) is not None:
        return {"weights_detail": reason}
    if not all(state["num_running"] for state in states):
        await _token(engine)
    return {}


async def _token(engine: upstream.EngineClient) -> None:
    """Generate one token; calls at the same time share it."""
    state = ClientState.of(engine)
    if state.probe is None or state.probe.done():
        state.probe = asyncio.create_task(_generate(engine))
    await asyncio.shield(state.probe)


async def _generate(engine: upstream.EngineClient) -> None:
    params = upstream.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    (prompt,) = await engine.renderer.render_cmpl_async([{"prompt_token_ids": [0]}])
    rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"

    async def run() -> None:
        async for _ in engine.generate(prompt, params, rid):
            pass

    await asyncio.wait_for(run(), HEALTH_LIMIT_S)


async def loads(request: Request, body: dict[str, Any]) -> Response:
    """How many requests run and wait on each engine, and how full their KV is."""
    fields = Fields(body)
    rank = _rank(fields.take("dp_rank"))
    fields.take("include")  # what is not asked for is sent all the same
    fields.one_of("format", (None, "json"))
    fields.only()
    engine = request.app.state.engine_client
    found = await _loads(engine)
    if rank is not None:
        if rank >= len(found):
            raise Malformed(f"dp_rank {rank}: there are {len(found)} engines")
        found = [found[rank]]
    return JSONResponse(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": installed(),
            "dp_rank_count": control_of(engine).num_engines,
            "loads": found,
            "aggregate": {
                "total_running_reqs": sum(each["num_running_reqs"] for each in found),
                "total_waiting_reqs": sum(each["num_waiting_reqs"] for each in found),
                "total_reqs": sum(each["num_total_reqs"] for each in found),
                "avg_token_usage": sum(e["token_usage"] for e in found) / len(found),
            },
        }
    )


async def get_load(request: Request, body: dict[str, Any]) -> Response:
    """The same in the form of older releases of SGLang."""
    Fields(body).only()
    found = await _loads(request.app.state.engine_client)
    return JSONResponse(
        [
            {
                "dp_rank": each["dp_rank"],
                "num_reqs": each["num_total_reqs"],
                "num_waiting_reqs": each["num_waiting_reqs"],
                "num_tokens": each["num_used_tokens"],
                "ts_tic": each["timestamp"],
            }
            for each in found
        ]
    )


async def _loads(engine: upstream.EngineClient) -> list[Reply]:
    replies = await control_of(engine).ask(CountRequests())
    return [
        {
            "dp_rank": rank,
            "timestamp": time.time(),
            "num_running_reqs": reply["num_running"],
            "num_waiting_reqs": reply["num_waiting"],
            "num_total_reqs": reply["num_running"] + reply["num_waiting"],
            "num_used_tokens": reply["kv_tokens"],
            "max_total_num_tokens": reply["max_kv_tokens"],
            "token_usage": reply["kv_tokens"] / max(1, reply["max_kv_tokens"]),
            "max_running_requests": engine.vllm_config.scheduler_config.max_num_seqs,
        }
        for rank, reply in enumerate(replies)
    ]


def _rank(value: object) -> int | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value[:9])
    raise Malformed(f"dp_rank must be a number, got {value!r:.80}")
