"""A process that is killed in the middle of an update takes its engine along, whole.

Until then every token is of one version and called so; afterwards no process is left,
no memory, and the next server starts and is updated.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.e2e.test_server import generate, stream
from tests.robustness.injection.cells import KILLS, POINTS, kills
from tests.robustness.injection.points import Trap
from tests.support.serving import Server
from tests.support.shared_memory import names, nothing_came
from tests.support.waiting import until

pytestmark = pytest.mark.engine

NUM_TOKENS = 200
QUICK = {("inside the flip", "rank 1")}
"""Those that every run runs; every start takes half a minute."""

CELLS = [
    pytest.param(
        cell.point,
        cell.place,
        id=str(cell),
        marks=() if (cell.point, cell.place) in QUICK else pytest.mark.slow,
    )
    for cell in kills()
]


@pytest.fixture
def server(trap: Trap, old: Path) -> Iterator[Server]:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(old, "--tensor-parallel-size", "2", env=env) as running:
        yield running


class Answer(NamedTuple):
    """What a client has of one request."""

    tokens: list[int]
    spans: list[dict[str, Any]]


def says(server: Server, answers: list[Answer]) -> None:
    """Stream the same request again and again, until the server ends one early.

    So one is under way whenever the engine ends, however fast the engine decodes.
    """
    with suppress(httpx.HTTPError, KeyError):
        while not answers or len(answers[-1].tokens) == NUM_TOKENS:
            answers.append(Answer([], []))
            for chunk in stream(server, NUM_TOKENS):
                for choice in chunk.get("choices", ()):
                    answers[-1].tokens.extend(choice["token_ids"] or ())
                    answers[-1].spans.extend(choice["weight_versions"])


def versions(answers: list[Answer]) -> set[str]:
    return {span["version"] for answer in answers for span in answer.spans}


def begins_as(answer: Answer, expected: list[int], served: str) -> bool:
    """Whether its tokens are `expected` up to the first of another version."""
    turned = [span["start"] for span in answer.spans if span["version"] != served]
    before = min(turned, default=len(answer.tokens))
    return answer.tokens[:before] == expected[:before]


@pytest.mark.parametrize(("point", "victim"), CELLS)
def test_an_engine_with_a_killed_process_ends_and_leaves_nothing_behind(
    server: Server, trap: Trap, new: Path, point: str, victim: str
) -> None:
    known = names()
    expected = generate(server, max_tokens=NUM_TOKENS)["token_ids"]
    family = [psutil.Process(server.pid)]
    family += family[0].children(recursive=True)
    place = "rank 1 of 2" if victim == "rank 1" else "rank 0 of 2"
    trap.arm(point, f"SIGKILL {victim}", place)
    answers: list[Answer] = []
    with ThreadPoolExecutor(1) as pool:
        speaking = pool.submit(says, server, answers)
        body = {"path": str(new), "weight_version": "new"}
        with pytest.raises(httpx.TransportError):
            reply = server.client.post("/update_weights_from_disk", json=body)
            assert reply.status_code >= 500, reply.text
            raise httpx.ReadError("it was told")
        speaking.result(timeout=60)
    assert trap.disarm(), "the point was not reached"
    are_gone(family)
    nothing_came(known)
    assert versions(answers) <= {"default", "new"}
    assert all(begins_as(answer, expected, "default") for answer in answers)


def are_gone(family: list[psutil.Process]) -> None:
    """Wait for the end of them all; fails with the names of those that live on."""
    with suppress(AssertionError):
        until(lambda: not any(map(lives, family)))
    assert [process.cmdline() for process in family if lives(process)] == []


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_process_is_killed_at_every_point() -> None:
    cells = {(cell.point, cell.place) for cell in kills()}
    assert cells == {(p, v) for p in POINTS if p != "reply" for v in KILLS}
    assert cells > QUICK


@pytest.mark.slow
def test_a_server_started_after_the_kills_can_be_updated(
    server: Server, new: Path
) -> None:
    body = {"path": str(new), "weight_version": "new"}
    assert server.post("/update_weights_from_disk", body)["weight_version"] == "new"
    assert generate(server)["weight_versions"][0]["version"] == "new"


def test_a_rank_stuck_in_a_step_ends_with_its_engine_core(
    server: Server, trap: Trap, new: Path
) -> None:
    """As in a step that its core was killed before it asked another rank for."""
    generate(server)
    family = psutil.Process(server.pid).children(recursive=True)
    (core,) = [each for each in family if "EngineCore" in " ".join(each.cmdline())]
    trap.arm("before the flip", "no end", "rank 1 of 2")
    body = {"path": str(new), "weight_version": "new"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.client.post, "/update_weights_from_disk", json=body)
        until(lambda: trap.was_hit, "the point was not reached")
        core.kill()
        are_gone(family)
        with suppress(httpx.TransportError):
            assert asked.result().status_code >= 500


@pytest.mark.slow
def test_a_rank_stuck_in_a_flip_ends_the_engine_with_a_reason(
    trap: Trap, old: Path, new: Path
) -> None:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    env["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = "8"
    with Server(old, "--tensor-parallel-size", "2", env=env) as server:
        generate(server)
        family = psutil.Process(server.pid).children(recursive=True)
        trap.arm("inside the flip", "long stall", "rank 1 of 2")
        body = {"path": str(new), "weight_version": "new"}
        try:
            reply = server.client.post("/update_weights_from_disk", json=body)
            assert reply.status_code >= 500, reply.text
        except httpx.TransportError:
            pass  # it ended before it could say so
        assert trap.disarm(), "the point was not reached"
        are_gone(family)
        assert "a flip failed and could not be undone" in server.log()
