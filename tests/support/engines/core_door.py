"""The HTTP routes in front of an engine core of this process: no server in between."""

import asyncio
from concurrent.futures import Future
from typing import Any

from vllm.v1.engine.core import EngineCore

from tests.support.engines.bare_core import Streams, add, prompt
from tests.support.route_stub import caller, served


class CoreClient:
    """What the routes ask of a front end, of a core that nobody else drives."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.engine_core = self
        self.core_engines = [b"0"]
        self.renderer = self
        self.vllm_config = core.vllm_config

    async def call_utility_all_async(
        self, _: str, method: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        answer = self.core.inflight(method, body)
        if isinstance(answer, Future):
            answer = await asyncio.wrap_future(answer)
        return [answer]

    def ensure_alive(self) -> None:
        """It is, in this process."""

    async def clear_mm_cache_async(self) -> None:
        """There is none."""

    async def sleep(self, **how: Any) -> None:
        self.core.sleep(**how)

    async def wake_up(self, tags: list[str] | None) -> bool:
        return bool(self.core.wake_up(tags))

    async def reset_prefix_cache(self, running: bool, external: bool) -> bool:
        return bool(self.core.reset_prefix_cache(running, external))


class Door:
    """A client of the routes.

    Args:
        core: the engine core behind them.

    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.client = caller(served(CoreClient(core)))

    def post(self, path: str, **body: Any) -> Any:
        """The decoded reply of a call that is not refused."""
        reply = self.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def get(self, path: str, **query: Any) -> Any:
        reply = self.client.get(path, params=query)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refused(self, path: str, **body: Any) -> tuple[int, str]:
        """Status and message of a call that is refused, in SGLang's shape."""
        reply = self.client.post(path, json=body)
        assert reply.status_code >= 400, reply.text
        assert reply.json()["success"] is False
        assert reply.json()["error"]["message"] == reply.json()["message"]
        return reply.status_code, reply.json()["message"]

    @property
    def label(self) -> str:
        return self.get("/weight_info")["weight_version"]


def said(core: EngineCore) -> dict[str, list[int]]:
    """What the weights served now make of three prompts."""
    for seed in range(3):
        add(core, f"probe{seed}", prompt(40 + seed), max_tokens=16)
    return Streams(core).run().tokens
