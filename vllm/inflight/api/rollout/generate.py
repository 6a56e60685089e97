"""`POST /generate`: run a request of SGLang's on vLLM's engine."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from vllm.inflight import upstream
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.api.rollout.reply import returns_routing, written
from vllm.inflight.api.rollout.request import Ask, Rollout, read
from vllm.inflight.errors import InflightError, Malformed

logger = upstream.init_logger(__name__)

DONE = "data: [DONE]\n\n"

Numbered = tuple[int, dict[str, Any]]
"""The number of a choice in the whole reply, and its reply so far."""


async def generate(request: Request, body: dict[str, Any]) -> Response:
    """Tokens for one prompt or several, in SGLang's form; a stream on request."""
    # As upstream's routes: until the reply begins, somebody listens for a client that
    # goes, and it counts in the server's load.
    answer = upstream.with_cancellation(upstream.load_aware_call(_answered))
    reply: Response | None = await answer(body, request)
    # Nobody reads an empty one: the client has gone.
    return Response() if reply is None else reply


async def _answered(body: dict[str, Any], request: Request) -> Response:
    """The reply, or a stream whose first reply is known.

    A rejection still has a status of its own then.
    """
    engine = request.app.state.engine_client
    rollout = read(body, request.headers.get("X-Request-Id") or uuid.uuid4().hex)
    _check(engine, rollout)
    adapters = [_adapter(request, ask.adapter) for ask in rollout.asks]
    prompts = await _rendered(engine, rollout)
    rank = rollout.data_parallel_rank
    if rank is None:
        rank = _rank_of_header(request)
    outputs = [
        engine.generate(
            prompt,
            ask.params,
            ask.rid,
            lora_request=adapter,
            data_parallel_rank=rank,
        )
        for ask, prompt, adapter in zip(rollout.asks, prompts, adapters, strict=True)
    ]
    replies = _replies(engine, rollout, outputs)
    try:
        if not rollout.streams:
            return await _whole(rollout, replies)
        first = await anext(replies)
    except (ValueError, upstream.VLLMClientError) as error:
        raise Malformed(str(error)) from None
    lines = _stream(first, replies, rollout)
    return StreamingResponse(lines, media_type="text/event-stream")


async def _whole(rollout: Rollout, replies: AsyncGenerator[Numbered, None]) -> Response:
    last: dict[int, dict[str, Any]] = {}
    async with aclosing(replies):
        async for number, reply in replies:
            last[number] = reply
    found = [last[number] for number in sorted(last)]
    return JSONResponse(found if rollout.is_list else found[0])


async def _replies(
    engine: upstream.EngineClient, rollout: Rollout, outputs: list[Any]
) -> AsyncGenerator[Numbered, None]:
    """The reply of every choice, as often as the engine has an output for it."""
    began = time.time()
    firsts = [sum(a.params.n for a in rollout.asks[:n]) for n in range(len(outputs))]
    async with aclosing(upstream.merge_async_iterators(*outputs)) as merged:
        async for at, result in merged:
            ask = rollout.asks[at]
            for output in result.outputs:
                live = "" if output.weight_versions else await _live(engine)
                reply = written(ask, result, output, live=live)
                if output.finish_reason is not None:
                    reply["meta_info"]["e2e_latency"] = time.time() - began
                yield firsts[at] + output.index, reply


async def _stream(
    first: Numbered, others: AsyncGenerator[Numbered, None], rollout: Rollout
) -> AsyncGenerator[str, None]:
    """Events of a stream; each has the whole choice so far, as SGLang's have."""

    def event(numbered: Numbered) -> str:
        number, reply = numbered
        if rollout.is_list:
            reply["index"] = number
        return f"data: {json.dumps(reply)}\n\n"

    async with aclosing(others):
        yield event(first)
        try:
            async for each in others:
                yield event(each)
        except (InflightError, upstream.VLLMError) as error:
            logger.warning("a stream of /generate has failed: %s", error)
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        yield DONE


async def _live(engine: upstream.EngineClient) -> str:
    return str((await control_of(engine).info())["weight_version"])


def _check(engine: upstream.EngineClient, rollout: Rollout) -> None:
    """Reject what the engine was not started for, or has no room for."""
    config = engine.vllm_config
    if rollout.has_routing and not returns_routing(config):
        raise Malformed(
            "return_routed_experts: the server has to be started with "
            "--enable-return-routed-experts"
        )
    vocabulary = config.model_config.get_vocab_size()
    for ask in rollout.asks:
        if not all(0 <= each < vocabulary for each in ask.params.stop_token_ids or ()):
            # With min_new_tokens such an id would end the engine.
            raise Malformed(
                f"sampling_params.stop_token_ids must be below {vocabulary}, the size "
                "of the vocabulary"
            )
    most = config.scheduler_config.max_num_seqs
    if (largest := max(ask.params.n for ask in rollout.asks)) > most:
        raise Malformed(
            f"sampling_params.n can be at most {most} here (--max-num-seqs), "
            f"got {largest}"
        )
    if engine.errored:
        raise engine.dead_error
    engine.check_admission(sum(ask.params.n for ask in rollout.asks))


async def _rendered(engine: upstream.EngineClient, rollout: Rollout) -> list[Any]:
    """The prompts as the engine takes them; text is tokenized."""
    prompts = [ask.prompt for ask in rollout.asks]
    try:
        rendered = list(await engine.renderer.render_cmpl_async(prompts))
    except (ValueError, upstream.VLLMClientError) as error:
        raise Malformed(f"the prompt is not accepted: {error}") from None
    for ask, prompt in zip(rollout.asks, rendered, strict=True):
        _check_start(ask, prompt)
    return rendered


def _check_start(ask: Ask, prompt: Any) -> None:
    start = None if ask.logprobs is None else ask.logprobs.start
    length = len(prompt.get("prompt_token_ids") or ())
    if start is not None and start > length:
        raise Malformed(
            f"logprob_start_len is {start}, and the prompt has {length} tokens"
        )


def _adapter(request: Request, name: str | None) -> upstream.LoRARequest | None:
    """The loaded adapter of a name, which SGLang calls its path."""
    if not name:
        return None
    models = getattr(request.app.state, "openai_serving_models", None)
    loaded = getattr(models, "lora_requests", {})
    if name not in loaded:
        known = ", ".join(loaded) or "none"
        raise Malformed(
            f"lora_path {name!r:.200} is not the name of a loaded adapter; loaded: "
            f"{known}. Load it with POST /v1/load_lora_adapter"
        )
    adapter: upstream.LoRARequest = loaded[name]
    return adapter


def _rank_of_header(request: Request) -> int | None:
    """The engine that a router has chosen; a header that is no number is ignored."""
    rank = request.headers.get("X-data-parallel-rank", "")
    return int(rank) if rank.isascii() and rank.isdecimal() else None
