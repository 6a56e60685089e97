"""Two API servers before one engine: what one does, the other knows."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Server
from vllm.inflight.api.server.admission import GENERATING
from vllm.inflight.api.server.rollout_routes import ROLLOUT_ROUTES
from vllm.inflight.api.server.routes import ROUTES

pytestmark = pytest.mark.engine

TIMES = 12
"""Calls enough that both servers answer some: each takes a connection of its own."""
PROMPT = list(range(30, 60))
TEXT = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT | {"prompt": PROMPT},
    "/v1/chat/completions": TEXT | {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 8},
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/inference/v1/generate": {
        "model": "tiny",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 8},
    },
}
ELSEWHERE = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/ping"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/abort_requests", "/scale_elastic_ep", "/is_scaling_elastic_ep"),
    *("/start_draft_weight_update", "/weight_checker"),
    *("/sleep", "/wake_up", "/release_kv_cache_memory", "/collective_rpc"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/v1/responses/{response_id}/cancel", "/inference/v1/abort_requests"),
)
"""Paths of POST that make no engine compute."""


@pytest.fixture(scope="module")
def running(old: Path) -> Iterator[Server]:
    flags = ("--api-server-count", "2", "--inflight-when-paused", "reject")
    with Server(old, *flags, env={"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    yield running
    running.post("/continue_generation")


def states(server: Server) -> list[Any]:
    return [server.client.get("/is_paused").json() for _ in range(TIMES)]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort", "wait"])
def test_a_pause_is_seen_and_ended_through_any_server(
    server: Server, mode: str
) -> None:
    assert server.post("/pause_generation", {"mode": mode})["paused"]
    assert {(s["is_paused"], s["mode"]) for s in states(server)} == {(True, mode)}
    server.post("/continue_generation")
    assert {state["is_paused"] for state in states(server)} == {False}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_no_route_that_generates_takes_a_request_during_a_pause(
    server: Server, path: str, stream: bool
) -> None:
    body = BODIES[path] | {"stream": stream}
    assert server.client.post(path, json=body).status_code == 200
    pause = {"mode": "in_place", "lease_s": 300}
    began = time.monotonic()
    server.post("/pause_generation", pause)
    for _ in range(TIMES):
        refused = server.client.post(path, json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_paused"
        left_s = 300 - (time.monotonic() - began)
        assert left_s <= int(refused.headers["Retry-After"]) <= 300
    assert server.client.get("/weight_info").status_code == 200
    server.post("/continue_generation")
    assert server.client.post(path, json=body).status_code == 200


def test_every_route_of_the_server_is_known_to_generate_or_not(
    server: Server,
) -> None:
    page = server.client.get("/openapi.json").json()["paths"]
    posts = {path for path, methods in page.items() if "post" in methods}
    posts = {path for path in posts if not path.endswith(("/render", "/derender"))}
    ours = {path for _, path in [*ROUTES, *ROLLOUT_ROUTES]}
    assert posts - GENERATING - ours - set(ELSEWHERE) == set()


def test_one_api_server_commits_what_the_other_has_staged(
    server: Server, old: Path, new: Path
) -> None:
    finished = threading.Event()
    body = BODIES["/v1/completions"] | {"max_tokens": 500, "return_token_ids": True}

    def client() -> list[Any]:
        mine = []
        while not finished.is_set():
            mine += server.post("/v1/completions", body)["choices"]
        return mine

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        for index in range(TIMES):
            path = (new, old)[index % 2]
            update = {"path": str(path), "weight_version": f"v{index}"}
            server.post("/update_weights_from_disk", update)
            told = [server.client.get("/weight_info").json() for _ in range(4)]
            assert {info["weight_version"] for info in told} == {f"v{index}"}
        finished.set()
        choices = [choice for each in clients for choice in each.result()]
    assert {len(choice["token_ids"]) for choice in choices} == {500}
    assert any(len(choice["weight_versions"]) > 1 for choice in choices)


def test_both_api_servers_get_requests(server: Server) -> None:
    """Otherwise none of the above shows anything."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text
    assert "vllm:" in lines
    log = server.log()
    assert all(f"ApiServer_{index}" in log for index in (0, 1))
