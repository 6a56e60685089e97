"""The control routes as the server attaches them, in front of no engine at all."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from vllm.inflight.api.routes import InflightEndpoints


class Engine:
    """Answers every control call, and notes that it was asked."""

    def __init__(self) -> None:
        self.engine_core = self
        self.asked: list[str] = []
        parallel = SimpleNamespace(world_size=1, world_size_across_dp=1)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    async def call_utility_all_async(
        self, _: str, method: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        self.asked.append(method)
        facts = {"update_id": "u", "phase": "staging", "is_paused": False}
        return [{"ok": facts | {"weight_version": "v", "epoch": 0}}]


def served(engine: Engine, **args: Any) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(**{"api_key": None} | args)
    app.state.engine_client = engine
    InflightEndpoints().attach_router(app)
    return app
