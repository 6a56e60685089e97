"""The rollout routes of SGLang, which trainers call instead of the OpenAI routes.

They are no control routes: they answer whoever may call `/v1/completions`, on the
server's own port.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import APIRouter, Request, Response

from vllm.inflight.api.request import auth
from vllm.inflight.api.request.body import SMALL_BYTES, parse, parsed, read
from vllm.inflight.api.request.refusal import refusal
from vllm.inflight.api.rollout.generate import generate
from vllm.inflight.api.server.load import get_load, health_generate, loads
from vllm.inflight.api.server.openapi import described
from vllm.inflight.errors import InflightError, Malformed
from vllm.inflight.update import MAX_MANIFEST_BYTES

Handler = Callable[[Request, dict[str, Any]], Awaitable[Response]]

ROLLOUT_ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/generate"): generate,
    ("GET", "/health_generate"): health_generate,
    ("POST", "/health_generate"): health_generate,
    ("GET", "/v1/loads"): loads,
    ("GET", "/get_load"): get_load,
}
"""Every rollout route: method and path → handler."""

OPEN = ("/health_generate",)
"""Paths that answer without the API key, as `/health` does."""


def add_rollout_routes(
    router: APIRouter, taken: Collection[tuple[str, str]] = ()
) -> None:
    """Add every rollout route but those `taken`."""
    for (method, path), handler in ROLLOUT_ROUTES.items():
        if (method, path) not in taken:
            router.add_api_route(
                path,
                _endpoint(handler, needs_key=path not in OPEN),
                methods=[method],
                name=handler.__name__,
                summary=(handler.__doc__ or "").strip().split("\n")[0],
                **described(method, path),
            )


def _endpoint(
    handler: Handler, *, needs_key: bool
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            if needs_key:
                auth.authorize_rollout(request)
            return await handler(request, await _body(request))
        except InflightError as error:
            return refusal(error)

    return endpoint


async def _body(request: Request) -> dict[str, Any]:
    """Query and body as one object. A page of another site cannot send JSON."""
    raw = await read(request, MAX_MANIFEST_BYTES)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if raw and kind != "application/json":
        raise Malformed("a body needs the header 'Content-Type: application/json'")
    fields = await parsed(raw) if len(raw) > SMALL_BYTES else parse(raw)
    return {**request.query_params, **fields}
