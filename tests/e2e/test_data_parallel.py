"""Two data-parallel engines behind two API servers.

What both serve is compared before it is; what is told of both, and if one hangs; and
that it is the same, whichever API server is asked.
"""

import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.support.api_servers import KEEP_ALIVE, ApiServer, api_servers
from tests.support.engines import gentle, matrix
from tests.support.engines.reference import Reference, unlikely
from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.update import PauseMode

pytestmark = pytest.mark.engine

NUM_REQUESTS = 6
NUM_TOKENS = 200
"""Of a request that is paused in its middle."""
TIMES = 8
"""Calls enough that both API servers answer some of them."""
PROBE = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 8, "temperature": 0}
BODY = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 900, "ignore_eos": True}


FLAGS = (
    *("--data-parallel-size", "2", "--api-server-count", "2"),
    *("--weight-transfer-config", '{"backend": "local"}'),
    *("--dtype", "float32", "--logits-processors", gentle.NAME),
)
ENV = KEEP_ALIVE | {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_SERVER_DEV_MODE": "1"}
IN_STEP = ("--hf-overrides", '{"num_experts": 4}')
"""A dense model that vLLM takes for a mixture of experts: its engines step together.
The CPU build runs no mixture with data parallelism."""


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    with Server(old, *FLAGS, env=ENV) as running:
        yield running


@pytest.fixture(scope="module")
def server_in_step(old: Path) -> Iterator[Server]:
    with Server(old, *FLAGS, *IN_STEP, env=ENV) as running:
        yield running


@pytest.fixture(
    scope="module",
    params=["server", pytest.param("server_in_step", marks=pytest.mark.slow)],
)
def apis(request: pytest.FixtureRequest) -> Iterator[list[ApiServer]]:
    """Both API servers, each by itself."""
    with api_servers(request.getfixturevalue(request.param)) as both:
        assert len(both) == 2
        yield both


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


@pytest.mark.parametrize(("mode", "label"), [("in_place", "new"), ("retract", "old")])
def test_the_calls_of_one_pause_and_update_may_go_to_either_api_server(
    apis: list[ApiServer], folders: dict[str, Path], mode: str, label: str
) -> None:
    """One pauses, the other one updates and lets go on; requests came to both."""
    (before,) = folders.keys() - {label}
    at_first = {"path": str(folders[before]), "weight_version": before}
    epoch = apis[0].post("/update_weights_from_disk", **at_first)["epoch"]
    door = matrix.Served(*apis)
    life = matrix.live_once(door, str(folders[label]), label, mode, NUM_TOKENS)
    assert life["is_paused"] is True
    assert all(life["paused in each"]), "one engine had no request"
    assert life["paused"] == matrix.NUM_REQUESTS
    assert life["counts"] == [NUM_TOKENS] * matrix.NUM_REQUESTS
    assert unlikely(Reference(folders, torch.float32), life, mode) == []
    assert len(door.replies) == matrix.NUM_REQUESTS
    for spans, headers in door.replies:
        told = [(span["version"], span["epoch"]) for span in spans]
        assert told == [(before, epoch), (label, epoch + 1)]
        assert headers["X-Weight-Version"] == label
        assert headers["X-Weight-Epoch"] == f"{epoch}-{epoch + 1}"


def told_alike(apis: list[ApiServer]) -> dict[str, Any]:
    """What is told of versions, if both API servers tell the same."""
    paths = ("/weight_info", "/weight_update", "/get_weight_version", "/is_paused")
    first, second = ({path: api.get(path) for path in paths} for api in apis)
    assert first == second
    return first


@pytest.mark.parametrize("turn", [1, -1], ids=["from the first", "from the second"])
def test_both_api_servers_report_an_update_its_commit_and_its_rollback(
    apis: list[ApiServer], old: Path, new: Path, turn: int
) -> None:
    here, there = apis[::turn]
    here.post("/update_weights_from_disk", path=str(old), weight_version="old")
    name = f"turn {turn}"
    begun = here.post("/start_weight_update", update_id=name, weight_version="new")
    assert begun["phase"] == "staging", begun
    active = there.get("/weight_update")["active"]
    assert active["update_id"] == name
    there.post("/update_weights", update_info={"path": str(new)}, update_id=name)
    committed = here.post("/finish_weight_update", update_id=name)
    told = told_alike(apis)
    info, known = told["/weight_info"], told["/weight_update"]
    assert {engine["weight_version"] for engine in info["engines"]} == {"new"}
    assert {engine["digest"] for engine in info["engines"]} == {committed["digest"]}
    assert info["previous"]["weight_version"] == "old"
    newest = known["outcomes"][0]
    assert (newest["update_id"], newest["phase"]) == (name, "committed")
    there.post("/rollback_weights")
    told = told_alike(apis)
    info, known = told["/weight_info"], told["/weight_update"]
    assert {engine["weight_version"] for engine in info["engines"]} == {"old"}
    assert info["previous"]["weight_version"] == "new"
    for engine in known["engines"]:
        newest = engine["outcomes"][0]
        assert (newest["update_id"], newest["phase"]) == (name, "rolled_back")
    for api in apis:
        choice = api.post("/v1/completions", **PROBE)["choices"][0]
        assert [span["version"] for span in choice["weight_versions"]] == ["old"]


@pytest.mark.parametrize("mode", PauseMode)
def test_a_renewal_at_either_api_server_only_renews_and_its_end_lets_both_go_on(
    apis: list[ApiServer], mode: PauseMode
) -> None:
    def pause(api: ApiServer, lease_s: float) -> Any:
        return api.post(
            "/pause_generation", mode=mode, lease_s=lease_s, owner="trainer"
        )

    def each(api: ApiServer, fact: str) -> list[Any]:
        return [engine[fact] for engine in api.get("/is_paused")["engines"]]

    before = each(apis[0], "leases_expired")
    assert pause(apis[0], 300)["paused"] is True
    late = PROBE | {"ignore_eos": True}
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        sent = [
            pool.submit(apis[number % 2].post, "/v1/completions", **late)
            for number in range(NUM_REQUESTS)
        ]

        def are_here() -> bool:
            replies = [pause(api, 300) for api in apis]
            for reply in replies:
                assert (reply["num_aborted"], reply["num_retracted"]) == (0, 0)
            return all(reply["num_waiting"] == NUM_REQUESTS for reply in replies)

        until(are_here, "the requests did not arrive", 60)
        pause(apis[1], 900)
        lefts = [left for api in apis for left in each(api, "lease_left_s")]
        assert len(lefts) == 4 and all(300 < left <= 900 for left in lefts)
        refused = apis[0].request(
            "POST", "/pause_generation", {"mode": mode, "owner": "another"}
        )
        assert refused.status_code == 423
        assert not any(request.done() for request in sent)
        pause(apis[0], 0.5)
        ended = [request.result()["choices"][0]["finish_reason"] for request in sent]
    assert ended == ["length"] * NUM_REQUESTS
    for api in apis:
        assert each(api, "is_paused") == [False, False]
        assert each(api, "leases_expired") == [number + 1 for number in before]


def test_metrics_of_an_engine_are_served_while_the_other_engine_hangs(
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
