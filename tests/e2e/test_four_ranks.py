"""Two engines of two tensor-parallel ranks each: all four ranks change, or none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import gentle, matrix
from tests.support.engines.mixtures import part
from tests.support.engines.reference import Reference, unlikely
from tests.support.engines.two_ranks_routes import odd
from tests.support.serving import Server

pytestmark = pytest.mark.engine

PARALLEL = ("--tensor-parallel-size", "2", "--data-parallel-size", "2")
NUM_TOKENS = 120
"""Of a request that is paused in its middle."""
CORES = "0|1|0|1"
"""For each rank, of the first engine and then of the second; two cores are enough."""


@pytest.fixture(scope="module")
def server(old: Path) -> Iterator[Server]:
    flags = (*PARALLEL, "--dtype", "float32", "--logits-processors", gentle.NAME)
    env = {"VLLM_CPU_OMP_THREADS_BIND": CORES}
    with Server(old, *flags, env=env) as running:
        yield running


def served(server: Server, folder: Path) -> list[str]:
    """The parameters of any rank that are not those of a checkpoint."""
    ranks = server.post("/weights_checker")["ranks"]
    places = [each["parallelism_info"] for each in ranks]
    assert [(at["dp_rank"], at["tp_rank"]) for at in places] == [
        *((0, 0), (0, 1), (1, 0), (1, 1))
    ]
    return odd(ranks, folder, torch.float32)


def label_of(server: Server) -> set[str]:
    engines = server.client.get("/weight_info").json()["engines"]
    assert len(engines) == 2
    return {engine["weight_version"] for engine in engines}


@pytest.mark.parametrize(
    ("mode", "label"),
    [
        ("in_place", "new"),
        pytest.param("retract", "old", marks=pytest.mark.slow),
    ],
)
def test_requests_of_both_engines_live_through_a_pause_and_an_update(
    server: Server, folders: dict[str, Path], mode: str, label: str
) -> None:
    (before,) = folders.keys() - {label}
    update = {"path": str(folders[before]), "weight_version": before}
    assert server.post("/update_weights_from_disk", update)["success"]
    door = matrix.Served(server)
    life = matrix.live_once(door, str(folders[label]), label, mode, NUM_TOKENS)
    assert life["is_paused"] is True
    assert all(life["paused in each"]), "one engine had no request"
    assert life["paused"] == matrix.NUM_REQUESTS
    assert life["counts"] == [NUM_TOKENS] * matrix.NUM_REQUESTS
    assert life["versions"] == [[before, label]] * matrix.NUM_REQUESTS
    assert unlikely(Reference(folders, torch.float32), life, mode) == []
    assert served(server, folders[label]) == []


def test_four_ranks_commit_and_roll_back_together(
    server: Server, folders: dict[str, Path]
) -> None:
    replies: dict[str, Any] = {}
    for label in ("new", "old"):
        folder = folders[label]
        update = {"path": str(folder), "weight_version": label}
        replies[label] = server.post("/update_weights_from_disk", update)
        assert label_of(server) == {label}
        assert served(server, folder) == []
        verified = server.post("/weights_checker", {"action": "verify"})
        assert verified["result"] == "equal", verified
        told = {engine["digest"] for engine in verified["engines"]}
        assert told == {replies[label]["digest"]}
    assert replies["old"]["digest"] != replies["new"]["digest"]
    server.post("/rollback_weights")
    assert label_of(server) == {"new"}
    assert served(server, folders["new"]) == []
    assert server.post("/weights_checker", {"action": "verify"})["result"] == "equal"


def test_a_checkpoint_that_lacks_a_tensor_is_committed_by_none_of_four(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    server.post("/update_weights_from_disk", {"path": str(folders["old"])})
    short = {"path": part(folders["new"], ("model.*",), tmp_path)}
    refused = server.client.post("/update_weights_from_disk", json=short)
    assert refused.status_code == 422
    assert "lm_head.weight" in refused.json()["message"]
    assert served(server, folders["old"]) == []
