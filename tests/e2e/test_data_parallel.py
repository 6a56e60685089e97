"""Two data-parallel engines behind two API servers.

What both serve is compared before it is; what is told of both, and if one hangs.
"""

import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

NUM_REQUESTS = 6
TIMES = 8
"""Calls enough that both API servers answer some of them."""
PROBE = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 8, "temperature": 0}
BODY = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_SERVER_DEV_MODE": "1"}
    flags = (
        *("--data-parallel-size", "2", "--api-server-count", "2"),
        *("--weight-transfer-config", '{"backend": "local"}'),
    )
    with Server(old, *flags, env=env) as running:
        yield running


def epochs(server: Server) -> set[str]:
    """The engines whose epoch is told."""
    lines = server.client.get("/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("vllm:inflight_epoch{")]
    return {line.split('"')[1] for line in told}


def labels(server: Server) -> set[tuple[str, ...]]:
    """What the engines serve, as each of both API servers tells it."""
    told = [server.client.get("/weight_info").json()["engines"] for _ in range(TIMES)]
    return {tuple(engine["weight_version"] for engine in each) for each in told}


@pytest.mark.parametrize("way", ["route", "workers"])
def test_engines_that_read_different_files_commit_neither(
    server: Server, old: Path, new: Path, way: str
) -> None:
    before = labels(server)
    infos = [{"path": str(old)}, {"path": str(new)}]
    if way == "route":
        server.post("/start_weight_update", {"update_id": "apart"})
        server.post("/update_weights", {"update_info": infos})
        refused = server.client.post("/finish_weight_update", json={})
        assert refused.status_code == 422
        told = refused.json()["message"]
    else:  # upstream's phases, as frameworks call them
        call = {"method": "start_weight_update"}
        assert server.post("/collective_rpc", call) == {"results": [None]}
        update = {"method": "update_weights", "kwargs": {"update_info": infos}}
        server.post("/collective_rpc", update)
        finish = {"method": "finish_weight_update"}
        assert server.client.post("/collective_rpc", json=finish).status_code == 500
        told = server.client.get("/weight_update").json()["outcomes"][0]["error"][
            "message"
        ]
    assert "staged different weights" in told
    assert len(set(re.findall(r"engine \d has digest ([0-9a-f]{32})", told))) == 2
    assert labels(server) == before
    answers = {str(server.post("/v1/completions", PROBE)["choices"]) for _ in range(8)}
    assert len(answers) == 1, "requests alternate between two versions"


def test_a_file_that_is_replaced_between_two_reads_is_served_by_neither(
    server: Server, old: Path, new: Path, tmp_path: Path
) -> None:
    """As a folder that is synchronised late to the disk of another host."""
    family = psutil.Process(server.pid).children(recursive=True)
    (late,) = (each for each in family if "EngineCore_DP1" in each.name())
    before = labels(server)
    shutil.copytree(old, tmp_path / "step")
    replaced = tmp_path / "step" / "model.safetensors"
    size = sum(tensor.nbytes for tensor in load_file(replaced).values())
    server.post("/start_weight_update", {"update_id": "late"})
    with ThreadPoolExecutor(1) as pool:
        late.send_signal(signal.SIGSTOP)
        try:
            info = {"update_info": {"path": str(tmp_path / "step")}}
            update = pool.submit(server.post, "/update_weights", info)
            until(lambda: read_by_one(server, size), "the first engine read nothing")
            replaced.unlink()
            shutil.copy(new / "model.safetensors", replaced)
        finally:
            late.send_signal(signal.SIGCONT)
        assert update.result()["phase"] == "staging"
    refused = server.client.post("/finish_weight_update", json={"update_id": "late"})
    assert refused.status_code == 422
    assert "staged different weights" in refused.json()["message"]
    assert labels(server) == before


def read_by_one(server: Server, size: int) -> bool:
    """Whether the first engine has read a checkpoint; the other one is stopped."""
    text = server.client.get("/metrics").text
    found = re.search(
        r'^vllm:inflight_update_staged_bytes{engine="0"} (.*)$', text, re.M
    )
    return found is not None and float(found[1]) >= size


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
    until(lambda: epochs(server) == {"0", "1"}, "not both are told of")
    family = psutil.Process(server.pid).children(recursive=True)
    (core,) = (each for each in family if "EngineCore_DP0" in each.name())
    core.send_signal(signal.SIGSTOP)
    try:
        # The answer before it is told again for a moment.
        until(lambda: epochs(server) == {"1"}, "it is told of what hangs", 30)
    finally:
        core.send_signal(signal.SIGCONT)
    until(lambda: epochs(server) == {"0", "1"}, "it was not heard again", 30)
