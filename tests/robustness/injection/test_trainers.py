"""A trainer that is killed in the middle of its update costs nothing but that.

Requests go on, the update is taken or given up as a whole, and the next trainer's is
served.
"""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_server import generate
from tests.robustness.injection import trainers
from tests.robustness.injection.cells import LEAVES, TRAINERS, WHILE_FINISHING
from tests.robustness.injection.points import Trap
from tests.support.serving import Server
from tests.support.shared_memory import FOLDER, names, nothing_came
from tests.support.waiting import until

pytestmark = pytest.mark.engine

DEADLINE_S = 10
"""Of the server's updates: nobody else ends one whose trainer is gone."""
NUM_REQUESTS = 4
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(way: str, trap: Trap, old: Path) -> Iterator[Server]:
    backend = json.dumps({"backend": trainers.BACKENDS[way]})
    flags = ("--inflight-update-deadline-s", str(DEADLINE_S))
    with Server(old, "--weight-transfer-config", backend, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def truth(server: Server, old: Path, new: Path) -> dict[str, Any]:
    """Digest and tokens of each version, after a plain update to it."""
    found = {}
    for label, folder in (("new", new), ("old", old)):
        load(server, folder)
        found[label] = serves(server)
    assert found["new"] != found["old"]
    return found


def load(server: Server, folder: Path) -> None:
    reply = server.post("/update_weights_from_disk", {"path": str(folder)})
    assert "error" not in reply


def serves(server: Server) -> tuple[str, list[int]]:
    info = server.client.get("/weight_info").json()
    return info["digest"], generate(server)["token_ids"]


def last_update(server: Server) -> dict[str, Any]:
    """The report of the latest, once none is under way."""

    def told() -> Any:
        return server.client.get("/weight_update").json()

    until(lambda: told()["active"] is None, "it is not given up", 3 * DEADLINE_S)
    report: dict[str, Any] = told()["outcomes"][0]
    return report


def params(name: str, values: tuple[str, ...], suffix: str = "") -> Any:
    """With ids that together are a cell."""
    return pytest.mark.parametrize(
        name,
        [pytest.param(value, id=value.replace(" ", "_") + suffix) for value in values],
        indirect=name == "way",
    )


@pytest.mark.slow
@params("way", TRAINERS)
@params("point", LEAVES, suffix="-SIGKILL_trainer")
def test_a_killed_trainer_costs_nothing_but_its_update(
    server: Server,
    trap: Trap,
    truth: dict[str, Any],
    old: Path,
    new: Path,
    way: str,
    point: str,
) -> None:
    known = names()
    own = point == "before finish"
    commits = point in WHILE_FINISHING
    trainer = trainers.start(way, server.url, new, dies=own)
    trap.arm(point, f"SIGKILL {trainer.pid}", "one rank")
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        running = [
            pool.submit(generate, server, max_tokens=NUM_TOKENS)
            for _ in range(NUM_REQUESTS)
        ]
        trainer.join(timeout=60)
        choices = [each.result() for each in running]
    assert trainer.exitcode == -signal.SIGKILL
    assert trap.disarm() or own, "the point was not reached"
    assert {len(choice["token_ids"]) for choice in choices} == {NUM_TOKENS}
    report = last_update(server)
    assert report["phase"] == ("committed" if commits else "aborted")
    assert serves(server) == truth["new" if commits else "old"]
    for name in names() - known:
        with suppress(FileNotFoundError):  # that of a test beside this one
            os.utime(FOLDER / name, (0, 0))  # the next may clear it away now
    load(server, old)
    trainer = trainers.start(way, server.url, new)
    trainer.join(timeout=60)
    assert trainer.exitcode == 0
    assert serves(server) == truth["new"]
    nothing_came(known)
    load(server, old)
