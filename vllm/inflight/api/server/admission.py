"""Admission of requests during a pause, and the version headers of their replies.

Requests that arrive during a pause wait in the queue, or are rejected.

`--inflight-when-paused reject` answers 503 with `Retry-After` at every route that
generates, before a stream has begun, and raises `EnginePaused` in `AsyncLLM` and `LLM`.
Each request asks the engine, because another server may have paused it.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from http import HTTPStatus

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm.inflight import upstream
from vllm.inflight.api.control.control import Control
from vllm.inflight.api.control.core_client import Reply
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.config import InflightConfig
from vllm.inflight.errors import EnginePaused
from vllm.inflight.outputs.headers import ReplyVersions, record

GENERATING = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/v1/systemone",
        "/cohere/v2/chat",
        "/inference/v1/generate",
        "/generative_scoring",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/invocations",
        "/generate",
        # Routes of pooling models.
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/embeddings",
        "/v2/embed",
    }
)
"""Paths of POST that make an engine compute; tests compare them with the server's."""

_is_admitted: ContextVar[bool] = ContextVar("inflight_is_admitted", default=False)


class RejectedWhilePaused(upstream.GracefulHTTPError, EnginePaused):
    """`EnginePaused` as an error that upstream passes on unchanged."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        # It calls the constructor of the other base class.
        upstream.GracefulHTTPError.__init__(self, message, HTTPStatus(self.status))
        self.retry_after_s = retry_after_s


class Admission:
    """ASGI middleware that rejects requests while the engine is paused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path in GENERATING:
                try:
                    await admit(scope["app"].state.engine_client)
                except EnginePaused as error:
                    await _refusal(error)(scope, receive, send)
                    return
                _is_admitted.set(True)
                record.set(seen := ReplyVersions())
                send = _marking(send, seen)
        await self._app(scope, receive, send)


def _marking(send: Send, seen: ReplyVersions) -> Send:
    """`send` that adds the headers of the versions noted before the reply begins."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *seen.headers()]
        await send(message)

    return marked


async def admit(engine: upstream.EngineClient) -> None:
    """Raise `EnginePaused` if `engine` is paused and rejects requests meanwhile."""
    owner = getattr(
        engine, "llm_engine", engine
    )  # an `LLM` has no configuration of its own
    config = InflightConfig.of(owner.vllm_config)
    if config.when_paused == "reject" and not _is_admitted.get():
        await check_not_paused(control_of(engine))


async def check_not_paused(control: Control) -> None:
    """Raise `EnginePaused` if an engine behind `control` is paused."""
    reply = await control.paused()
    states: list[Reply] = reply.get("engines", [reply])
    paused = [
        state
        for state in states
        if state["is_paused"] and not (state["for_commit"] or state["absorbed"])
    ]
    if not paused:
        return
    modes = ", ".join(sorted({state["mode"] for state in paused}))
    left = [s["lease_left_s"] for s in paused if s["lease_left_s"] is not None]
    raise RejectedWhilePaused(
        f"the engine is paused ({modes}) and takes no requests until it continues",
        retry_after_s=math.ceil(max(left, default=1.0)) or 1,
    )


def _refusal(error: EnginePaused) -> JSONResponse:
    headers = {"Retry-After": str(error.retry_after_s)}
    return JSONResponse({"error": error.to_dict()}, error.status, headers)
