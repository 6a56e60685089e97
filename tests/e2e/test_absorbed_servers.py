"""Absorbed pauses behind two API servers: each knows what came through the other."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_servers import KEEP_ALIVE, ApiServer, api_servers
from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

MAX_MODEL_LEN = 16384
SHAPE = {"positions": MAX_MODEL_LEN}
ENDLESS = MAX_MODEL_LEN - 100
"""Tokens of a request that runs until it is aborted, however fast the machine is."""
FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN)),
    *("--api-server-count", "2", "--inflight-pauses", "absorb"),
    *("--inflight-when-paused", "reject", "--worker-extension-cls"),
    "tests.support.frameworks.by_hand.PrimeRLFiles",
)
ENV = KEEP_ALIVE | {"VLLM_SERVER_DEV_MODE": "1"}
BODY = {
    "model": "tiny",
    "prompt": list(range(30, 60)),
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def servers(old: Path) -> Iterator[list[ApiServer]]:
    with Server(old, *FLAGS, env=ENV) as running, api_servers(running) as found:
        assert len(found) == 2
        yield found


@pytest.fixture
def pair(servers: list[ApiServer], old: Path) -> Iterator[list[ApiServer]]:
    servers[0].post("/update_weights_from_disk", path=str(old), weight_version="old")
    yield servers
    servers[0].post("/continue_generation")


def completion(server: ApiServer, num_tokens: int) -> Any:
    return server.request("POST", "/v1/completions", BODY | {"max_tokens": num_tokens})


def num_running(server: ApiServer) -> int:
    """The requests that the engine computes now, whoever asked for them."""
    (load,) = server.get("/v1/loads")["loads"]
    number: int = load["num_running_reqs"]
    return number


def states(servers: list[ApiServer]) -> list[tuple[bool, bool]]:
    told = [server.get("/is_paused") for server in servers]
    return [(state["is_paused"], state["absorbed"]) for state in told]


def test_a_frameworks_pause_update_and_resume_may_take_any_api_server(
    pair: list[ApiServer], new: Path
) -> None:
    one, other = pair
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(completion, server, ENDLESS) for server in pair]
        until(lambda: num_running(one) == 2)
        assert one.post("/pause?mode=keep&clear_cache=false")["absorbed"] is True
        assert states(pair) == [(True, True)] * 2
        call = {"method": "update_weights_from_path", "args": [str(new)]}
        assert other.request("POST", "/collective_rpc", call).status_code == 200
        for server in pair:  # neither rejects what comes during the pause
            reply = completion(server, 8)
            assert reply.status_code == 200, reply.text
            (span,) = reply.json()["choices"][0]["weight_versions"]
            assert span["version"] == new.name
        assert states(pair) == [(True, True)] * 2
        assert other.post("/resume")["paused"] is False
        assert states(pair) == [(False, False)] * 2
        assert not any(each.done() for each in running)
        assert one.post("/abort_request", abort_all=True)["num_aborted"] == 2
        for each in running:
            (choice,) = each.result().json()["choices"]
            spans = choice["weight_versions"]
            assert [span["version"] for span in spans] == ["old", new.name]
            assert spans[-1]["end"] == len(choice["token_ids"])
    assert {server.get("/weight_info")["weight_version"] for server in pair} == {
        new.name
    }


def test_a_pause_that_takes_force_through_one_stops_requests_of_the_other(
    pair: list[ApiServer],
) -> None:
    one, other = pair
    assert one.post("/pause_generation", mode="in_place")["absorbed"] is True
    assert completion(other, 4).status_code == 200
    reset = "/reset_prefix_cache?reset_running_requests=true"
    assert other.request("POST", reset).status_code == 200
    assert states(pair) == [(True, False)] * 2
    for server in pair:
        reply = completion(server, 4)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_paused"
    assert one.post("/continue_generation")["paused"] is False
    assert completion(other, 4).status_code == 200
