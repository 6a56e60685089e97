"""The control routes as the server attaches them, in front of a recorded engine."""

from __future__ import annotations

from argparse import Namespace
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from tests.support.engine_replies import recorded
from vllm.inflight.api.server.routes import InflightEndpoints
from vllm.inflight.calls import AdvanceUpdate

REPLIES = recorded()


class Engine:
    """Answers each control call as a real core did, and notes the call."""

    def __init__(self) -> None:
        self.engine_core = self
        self.core_engines = [b"0"]
        self.asked: list[str] = []
        parallel = SimpleNamespace(
            world_size=1,
            world_size_across_dp=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        )
        model = SimpleNamespace(
            enable_sleep_mode=False,
            model="model",
            tokenizer="model",
            runner_type="generate",
            hf_config=SimpleNamespace(model_type="qwen3"),
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, model_config=model, additional_config={}
        )
        self.renderer = self

    async def call_utility_all_async(
        self, _: str, method: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        if method == AdvanceUpdate.name:
            for name, fields in body["calls"]:
                answers = await self.call_utility_all_async(_, name, fields)
            return answers
        self.asked.append(method)
        return [{"ok": reply(method, body)}]

    def ensure_alive(self) -> None:
        """It is."""

    async def clear_mm_cache_async(self) -> None:
        """There is none."""

    async def reset_prefix_cache(self, *_: bool) -> bool:
        return True


def reply(method: str, body: dict[str, Any]) -> dict[str, Any]:
    """The recorded reply to a call of an idle engine, with the caller's update id."""
    key = method
    if method == "pause" and body.get("is_trial"):
        key = "pause as a trial"
    if method == "status" and body.get("update_id") is not None:
        key = "status of an update"
    found: dict[str, Any] = deepcopy(REPLIES[key])
    if "update_id" in found and body.get("update_id") is not None:
        found["update_id"] = body["update_id"]
    return found


def served(engine: Engine, **args: Any) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(**{"api_key": None} | args)
    app.state.engine_client = engine
    InflightEndpoints().attach_router(app)
    return app


def caller(app: FastAPI, host: str = "127.0.0.1") -> TestClient:
    """A client on the server's own host, which needs no key while none is set."""
    return TestClient(app, base_url="http://localhost", client=(host, 1))
