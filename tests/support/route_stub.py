"""The control routes as the server attaches them, in front of no engine at all."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from vllm.inflight.api.server.routes import InflightEndpoints


class Engine:
    """Answers every control call, and notes that it was asked."""

    def __init__(self) -> None:
        self.engine_core = self
        self.core_engines = [b"0"]
        self.asked: list[str] = []
        parallel = SimpleNamespace(
            world_size=1, world_size_across_dp=1, data_parallel_size=1
        )
        model = SimpleNamespace(enable_sleep_mode=False)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, model_config=model, additional_config={}
        )
        self.renderer = self

    async def call_utility_all_async(
        self, _: str, method: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        self.asked.append(method)
        facts = {"update_id": "u", "phase": "staging", "is_paused": False}
        facts |= {"owner": None, "ends_on_waking": False}
        facts |= {"active": None, "num_running": 0, "num_waiting": 0, "paused": False}
        facts |= {"num_aborted": 0, "ranks": [], "rows": [], "dropped": {}}
        facts |= {"unused": [], "tied": []}
        facts |= {
            "was_started": False,
            "found": None,
            "path": None,
            "tried": True,
            "weights": "live",
        }
        facts |= {"parameters": {"total": 1, "begun": 1, "complete": 1}}
        return [{"ok": facts | {"weight_version": "v", "epoch": 0}}]

    def ensure_alive(self) -> None:
        """It is."""

    async def clear_mm_cache_async(self) -> None:
        """There is none."""

    async def reset_prefix_cache(self, *_: bool) -> bool:
        return True


def served(engine: Engine, **args: Any) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(**{"api_key": None} | args)
    app.state.engine_client = engine
    InflightEndpoints().attach_router(app)
    return app


def caller(app: FastAPI, host: str = "127.0.0.1") -> TestClient:
    """A client on the server's own host, which needs no key while none is set."""
    return TestClient(app, base_url="http://localhost", client=(host, 1))
