"""Worker calls of a front end that become one call of all its engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm.inflight.api.compat import worker_calls
from vllm.inflight.packed import is_packed

LARGE = {"names": ["a"] * 2000}
REQUEST = {"version": 1, "parameters_info": []}


class Front:
    """An `AsyncLLM` to the calls; its engines note what they are asked."""

    def __init__(self, num_engines: int) -> None:
        parallel = SimpleNamespace(
            world_size=3, worker_extension_cls="", worker_cls="auto"
        )
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.engine_core = self
        self.core_engines = [b"0"] * num_engines
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def call_utility_all_async(
        self, _: str, method: str, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        self.asked.append((method, body))
        vote = {"update_id": "u", "phase": "staged", "digest": "d", "sent": "s"}
        return [{"ok": dict(vote)} for _ in self.core_engines]


@pytest.mark.parametrize(
    ("num_engines", "method", "args", "kwargs", "is_taken"),
    [
        (2, "start_weight_update", (), None, True),
        (2, "finish_weight_update", (), {}, True),
        (2, "receive_weight_update", (REQUEST,), None, True),
        (2, "receive_weight_update", ("something else",), None, False),
        (2, "update_weights", ({"path": "/"},), None, True),
        (2, "reload_weights", (), None, False),
        (2, len, (), None, False),
        (1, "finish_weight_update", (), None, False),
        (1, "update_weights", ({"path": "/"},), None, False),
        (1, "update_weights", (LARGE,), None, True),
        (1, "update_weights", (), {"update_info": [{"path": "/"}, LARGE]}, True),
    ],
)
def test_only_known_worker_calls_with_valid_arguments_are_intercepted(
    num_engines, method, args, kwargs, is_taken
):
    front = Front(num_engines)
    assert worker_calls.takes(front, method, args, kwargs) is is_taken


async def test_a_finish_on_the_workers_prepares_all_before_any_commits():
    front = Front(2)
    reply = await worker_calls.carry_out(front, "finish_weight_update", (), None)
    assert [method for method, _ in front.asked] == ["prepare", "commit"]
    assert reply == [None] * 3, "one for each rank"


async def test_large_worker_calls_travel_packed():
    front = Front(1)
    await worker_calls.carry_out(front, "update_weights", (LARGE,), None)
    ((method, body),) = front.asked
    assert (method, is_packed(body["update_info"]["names"])) == ("receive", True)
