"""`POST /generate`: a client that has gone has no request, and is no load."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI

from vllm.inflight.api.server.rollout_routes import add_rollout_routes


class Engine:
    """Gives no output, as in a pause."""

    errored = False

    def __init__(self) -> None:
        self.num_running = 0
        self.vllm_config = SimpleNamespace(
            additional_config={},
            model_config=SimpleNamespace(get_vocab_size=lambda: 100),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )
        self.renderer = self

    def check_admission(self, num: int) -> None:
        pass

    async def render_cmpl_async(self, prompts: list[Any]) -> list[Any]:
        return prompts

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.num_running += 1
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.num_running -= 1


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_client_that_goes_before_the_first_token_leaves_no_request(
    streams: bool,
) -> None:
    engine, app, router = Engine(), FastAPI(), APIRouter()
    add_rollout_routes(router)
    app.include_router(router)
    app.state.engine_client, app.state.args = engine, SimpleNamespace(api_key=None)
    app.state.enable_server_load_tracking, app.state.server_load_metrics = True, 0
    body = {"input_ids": [1, 2, 3], "stream": streams}
    gone = asyncio.Event()
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> Any:
        if (message := next(messages, None)) is not None:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    scope = {
        **{"type": "http", "method": "POST", "path": "/generate", "query_string": b""},
        "headers": [(b"content-type", b"application/json")],
    }
    calling = asyncio.create_task(app(scope, receive, send))
    while not engine.num_running:
        await asyncio.sleep(0.01)
    assert app.state.server_load_metrics == 1
    gone.set()
    await asyncio.wait_for(calling, 30)
    assert not engine.num_running
    assert app.state.server_load_metrics == 0
