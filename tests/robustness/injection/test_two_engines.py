"""Faults in one of two data-parallel engines: both serve one version, the same."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_server import generate
from tests.robustness.injection.cells import ENGINES, Cell, params
from tests.robustness.injection.conftest import manifest_of
from tests.robustness.injection.points import Trap
from tests.support.serving import Server

pytestmark = pytest.mark.engine

NUM_REQUESTS = 6
DEADLINE_S = 2.5
"""Of an update that stalls: less than the stall, and enough to get there, whatever runs
beside it."""


@pytest.fixture(scope="module")
def server(trap: Trap, old: Path) -> Iterator[Server]:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(old, "--data-parallel-size", "2", env=env) as running:
        yield running


def said(server: Server) -> set[tuple[str, tuple[int, ...]]]:
    """By whom it was sampled, and what; of enough requests for both engines."""
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        made = [pool.submit(generate, server) for _ in range(NUM_REQUESTS)]
    choices = [each.result() for each in made]
    return {
        (span["version"], tuple(choice["token_ids"]))
        for choice in choices
        for span in choice["weight_versions"]
    }


def serves(server: Server) -> tuple[str, str, tuple[int, ...]]:
    """Label, digest of the weights and tokens, if they are those of both engines."""
    ((label, tokens),) = said(server)
    info = server.client.get("/weight_info").json()
    assert [each["weight_version"] for each in info["engines"]] == [label] * 2
    ranks = server.post("/weights_checker")["ranks"]
    assert len(ranks) == 2
    (digest,) = {rank["per_gpu_checksum"] for rank in ranks}
    return label, digest, tokens


def update(server: Server, folder: Path, label: str, **options: Any) -> str:
    body = {"path": str(folder), "weight_version": label, **options}
    reply = server.post("/update_weights_from_disk", body)
    return str(reply["error"]["code"]) if "error" in reply else "committed"


@pytest.fixture(scope="module")
def truth(server: Server, old: Path, new: Path) -> dict[str, Any]:
    """What both engines serve after a plain update."""
    found = {}
    for label, folder in (("new", new), ("old", old)):
        assert update(server, folder, label) == "committed"
        found[label] = serves(server)
    assert found["new"][1:] != found["old"][1:]
    return found


@pytest.mark.parametrize("cell", params(*ENGINES))
def test_both_engines_serve_one_whole_version_and_the_next_update_works(
    server: Server,
    trap: Trap,
    truth: dict[str, Any],
    old: Path,
    new: Path,
    cell: Cell,
) -> None:
    options: dict[str, Any] = {"deadline_s": 60.0}
    if cell.fault == "stall":
        options["deadline_s"] = DEADLINE_S
    if cell.fault == "other bytes":
        options["manifest"] = manifest_of(new)
    options["update_id"] = f"cell-{time.time_ns()}"
    trap.arm(cell.point, cell.fault, cell.place)
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        running = [
            pool.submit(generate, server, max_tokens=60) for _ in range(NUM_REQUESTS)
        ]
        code = update(server, new, "new", **options)
        choices = [each.result() for each in running]
    assert trap.disarm(), "the point was not reached"
    assert code == cell.outcome
    assert {len(choice["token_ids"]) for choice in choices} == {60}
    spans = [span for choice in choices for span in choice["weight_versions"]]
    assert {span["version"] for span in spans} <= {"old", "new"}
    label = "new" if code == "committed" else "old"
    assert serves(server) == truth[label]
    for label, folder in (("new", new), ("old", old)):
        assert update(server, folder, label) == "committed"
        assert serves(server) == truth[label]
