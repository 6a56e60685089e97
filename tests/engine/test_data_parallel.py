"""A server of two data-parallel engines: what is told of both, and if one hangs."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.serving import Server
from tests.waiting import until

pytestmark = pytest.mark.engine

NUM_REQUESTS = 6
BODY = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    flags = (
        *("--data-parallel-size", "2"),
        *("--weight-transfer-config", '{"backend": "local"}'),
    )
    with Server(old, *flags, env=env) as running:
        yield running


def epochs(server: Server) -> set[str]:
    """The engines whose epoch is told."""
    lines = server.client.get("/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("vllm:inflight_epoch{")]
    return {line.split('"')[1] for line in told}


def test_a_pause_and_a_chunk_count_what_is_in_both(server: Server, new: Path) -> None:
    server.post("/pause_generation", {"mode": "in_place"})  # they gather
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        sent = [
            pool.submit(server.post, "/v1/completions", BODY)
            for _ in range(NUM_REQUESTS)
        ]

        def are_here() -> bool:
            reply = server.post("/pause_generation", {"mode": "in_place"})
            return bool(reply["num_running"] + reply["num_waiting"] == NUM_REQUESTS)

        until(are_here, "the requests did not arrive", 60)
        reply = server.post("/pause_generation", {"mode": "abort"})
        assert reply["num_aborted"] == NUM_REQUESTS
        each = [engine["num_aborted"] for engine in reply["engines"]]
        assert sum(each) == NUM_REQUESTS
        assert all(each), "one engine had no request"
        assert [request.result()["choices"] for request in sent]
    server.post("/continue_generation")
    server.post("/start_weight_update", {"update_id": "u"})
    got = server.post("/update_weights", {"update_info": {"path": str(new)}})
    assert got["bytes"] == sum(engine["bytes"] for engine in got["engines"])
    assert got["bytes"] == 2 * got["engines"][0]["bytes"] > 0
    server.post("/abort_weight_update", {"update_id": "u"})


def test_an_engine_that_hangs_takes_no_metrics_of_the_other_away(
    server: Server,
) -> None:
    assert epochs(server) == {"0", "1"}
    family = psutil.Process(server.pid).children(recursive=True)
    (core,) = (each for each in family if "EngineCore_DP0" in each.name())
    core.send_signal(signal.SIGSTOP)
    try:
        assert epochs(server) == {"1"}
    finally:
        core.send_signal(signal.SIGCONT)
    until(lambda: epochs(server) == {"0", "1"}, "it was not heard again", 30)
