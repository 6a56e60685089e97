"""Delta staging in two data-parallel engines: each has one set of weights, and a log.

They are independent, or step together. An update is committed by both or by neither.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.test_data_parallel import IN_STEP, PROBE
from tests.support.deltas import stepped
from tests.support.serving import Server
from tests.support.waiting import until
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

FLAGS = (
    *("--data-parallel-size", "2", "--dtype", "bfloat16"),
    *("--weight-transfer-config", '{"backend": "local"}'),
    *("--inflight-staging", "delta", "--inflight-delta-gib", "0.02"),
    *("--worker-extension-cls", "tests.support.engines.unpacked_ranks.Unpacked"),
)
ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((), id="independent"),
        pytest.param(IN_STEP, id="in step", marks=pytest.mark.slow),
    ],
)
def server(request: pytest.FixtureRequest, old: Path) -> Iterator[Server]:
    with Server(old, *FLAGS, *request.param, env=ENV) as running:
        until(lambda: "one set of weights, and a log of" in running.log())
        yield running


def says(server: Server) -> str:
    """What both engines say; each answers some of the calls."""
    answers = {
        server.post("/v1/completions", PROBE)["choices"][0]["text"] for _ in range(6)
    }
    (said,) = answers
    return str(said)


def served(server: Server) -> tuple[str, str]:
    """The digest of what both engines serve, and what they say."""
    engines = server.client.get("/weight_info").json()["engines"]
    (digest,) = {engine["digest"] for engine in engines}
    assert len(engines) == 2
    return digest, says(server)


def from_disk(server: Server, path: Path, label: str) -> Any:
    body = {"path": str(path), "weight_version": label}
    return server.post("/update_weights_from_disk", body)


def test_versions_deltas_and_rollbacks_are_those_of_both_engines(
    server: Server, old: Path, new: Path, tmp_path: Path
) -> None:
    from_disk(server, old, "old")
    first = served(server)
    from_disk(server, new, "new")
    second = served(server)
    assert first[0] != second[0] and first[1] != second[1]
    server.post("/rollback_weights", {})
    assert served(server) == first
    weights = load_file(new / "model.safetensors")
    with Publisher(server.url, lambda: weights) as to:
        to.publish(version="whole")
        assert served(server) == second
        weights = stepped(weights, 1)
        assert to.publish(version="delta").is_delta
        third = served(server)
        assert third != second
    from_disk(server, old, "old")
    assert served(server) == first
    with Publisher(server.url, lambda: weights, delta="off") as to:
        to.publish(version="the same, whole")
    assert served(server) == third


def test_weights_that_one_call_has_lost_on_both_are_filled_on_both(
    server: Server, new: Path
) -> None:
    from_disk(server, new, "new")
    before = served(server)
    call = {"method": "tests_fail_as_it_writes"}
    assert server.client.post("/collective_rpc", json=call).status_code == 500
    engines = server.client.get("/weight_info").json()["engines"]
    assert {engine["weights"] for engine in engines} == {"gone"}
    from_disk(server, new, "again")
    assert served(server) == before
