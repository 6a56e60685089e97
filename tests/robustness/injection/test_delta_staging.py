"""Faults in an engine with delta staging: at the points of any update, and of deltas.

The swap is stopped in its middle, where the one set of weights belongs to no version.
What is raised there ends the engine. So an engine in this process has no such cell, and
a server with processes of its own has it: see `TORN`.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_server import generate
from tests.robustness.injection.cells import (
    CHEAP,
    CODE,
    DELTA,
    RAISED,
    Cell,
    all_cells,
    quick,
)
from tests.robustness.injection.points import Trap
from tests.robustness.injection.subject import SLACK_S, Subject
from tests.robustness.injection.test_killed import (
    NUM_TOKENS,
    Answer,
    are_gone,
    begins_as,
    says,
    versions,
)
from tests.support.deltas import delta_between, stepped
from tests.support.engines.unpacked import unpacked
from tests.support.serving import Server
from tests.support.shared_memory import names, nothing_came
from tests.support.waiting import until
from vllm.inflight.errors import InflightError
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

LOG = {"staging": "delta", "delta_gib": 0.02}
IN_FLIP = "inside the flip"


@pytest.fixture(scope="module", autouse=True)
def without_packing() -> Iterator[None]:
    with unpacked():
        yield


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {
        "weight_transfer_config": WeightTransferConfig(backend="local"),
        "additional_config": {"inflight": LOG},
    }


def has_end(cell: Cell) -> bool:
    """Whether the engine lives on, which would end this process as well."""
    return cell.point != IN_FLIP or cell.fault not in RAISED


WHOLE = [
    pytest.param(c, id=str(c), marks=() if c in quick() else pytest.mark.slow)
    for c in all_cells()
    if c.place in CHEAP and has_end(c)
]
OF_DELTAS = [
    Cell(*facts, "rank 0 of 1")  # which has its cells of whole versions as `one rank`
    for facts in (
        *product(DELTA, CODE),
        *product(("before the flip", IN_FLIP, "after the flip"), ["stall"]),
        ("vote", "exception"),
    )
]


@pytest.mark.parametrize("cell", WHOLE)
def test_a_whole_version_is_served_and_the_next_update_works(
    subject: Subject, cell: Cell
) -> None:
    subject.survives(cell)


class DeltaSubject(Subject):
    """It is brought to the new version by a delta."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        vars(self).update(vars(subject))
        old, new = (
            load_file(self._folders[label] / "model.safetensors")
            for label in ("old", "new")
        )
        self._file = folder / "delta.safetensors"
        self.llm.update_weights_from_disk(str(self._folders["old"]), "old")
        base = self.llm.weight_info()["digest"]
        self._of_delta, parts = delta_between(old, new, base)
        save_file(parts, self._file)

    def _update(self, cell: Cell) -> str:
        llm, deadline_s = self.llm, 2 * SLACK_S
        try:
            llm.start_weight_update(
                update_id=str(cell), manifest=self._of_delta, deadline_s=deadline_s
            )
            llm.update_weights({"path": str(self._file)}, update_id=str(cell))
            llm.finish_weight_update("new", update_id=str(cell))
        except InflightError as error:
            if llm.weight_update_status()["active"] is not None:
                llm.abort_weight_update(update_id=str(cell))
            return error.code
        return "committed"


@pytest.mark.parametrize("cell", OF_DELTAS, ids=str)
def test_a_delta_is_served_or_none_of_it_and_the_next_update_works(
    subject: Subject, tmp_path: Path, cell: Cell
) -> None:
    DeltaSubject(subject, tmp_path).survives(cell)


KILLS = ("decode", "prove", "before the flip", IN_FLIP, "after the flip", "undo")
QUICK = {(IN_FLIP, "rank 1"), ("undo", "rank 1")}


@pytest.fixture
def server(trap: Trap, old: Path) -> Iterator[Server]:
    flags = ("--tensor-parallel-size", "2", "--inflight-staging", "delta")
    flags += ("--inflight-delta-gib", "0.02")
    flags += ("--weight-transfer-config", '{"backend": "local"}')
    extension = "tests.support.engines.unpacked_ranks.Unpacked"
    flags += ("--worker-extension-cls", extension)
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with Server(old, *flags, env=env) as running:
        yield running


NAMED = dict(zip(RAISED, ("RuntimeError", "OutOfMemoryError"), strict=True))
TORN = [
    (point, fault, victim)
    for point in (IN_FLIP, "undo")
    for fault in RAISED
    for victim in ("rank 0", "rank 1")
]
"""What is raised in the middle of the swap of a commit, and of a rollback."""


@pytest.mark.parametrize(
    ("point", "fault", "victim"),
    [
        pytest.param(
            *cell, id="-".join(cell), marks=() if cell == TORN[1] else pytest.mark.slow
        )
        for cell in TORN
    ],
)
def test_a_fault_within_the_swap_ends_the_engine_and_every_caller_is_told(
    server: Server, trap: Trap, old: Path, point: str, fault: str, victim: str
) -> None:
    """The set of weights is a mixture then, so no token may be made with it."""
    known, weights = names(), load_file(old / "model.safetensors")
    family = [psutil.Process(server.pid)]
    family += family[0].children(recursive=True)
    answers: list[Answer] = []
    with Publisher(server.url, lambda: weights, timeout_s=30) as to:
        to.publish(version="whole")
        weights = stepped(weights, 1, share=0.2)
        if point == "undo":
            assert to.publish(version="delta").is_delta
        expected = generate(server, max_tokens=NUM_TOKENS)["token_ids"]
        trap.arm(IN_FLIP, fault, f"{victim} of 2")
        with ThreadPoolExecutor(1) as pool:
            speaking = pool.submit(says, server, answers)
            until(lambda: answers and answers[0].tokens)
            # The publisher sends the whole version next, to a server that may be gone.
            with pytest.raises(InflightError, match=r"log of the server|no answer to"):
                to.rollback() if point == "undo" else to.publish(version="delta")
            assert is_unhealthy(server)
            speaking.result(timeout=60)
    assert trap.disarm(), "the point was not reached"
    are_gone(family)
    nothing_came(known)
    log = server.log()
    assert f"a swap broke off: {NAMED[fault]}('injected at {IN_FLIP}'" in log
    assert "the live weights may mix two versions" in log
    assert all(a.tokens == expected[: len(a.tokens)] for a in answers)
    assert len(answers[-1].tokens) < NUM_TOKENS
    assert versions(answers) == {"delta" if point == "undo" else "whole"}


def is_unhealthy(server: Server) -> bool:
    """Whether the server says that its engine has ended, or does not answer."""
    try:
        return server.client.get("/health").status_code == 503
    except httpx.TransportError:
        return True


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        pytest.param(
            *cell, id="-".join(cell), marks=() if cell in QUICK else pytest.mark.slow
        )
        for cell in product(KILLS, ("rank 0", "rank 1"))
    ],
)
def test_an_engine_with_a_killed_rank_ends_and_says_nothing_of_a_mixture(
    server: Server, trap: Trap, old: Path, point: str, victim: str
) -> None:
    """At `undo`, a rank is killed in the middle of the swap of a rollback."""
    known, weights = names(), load_file(old / "model.safetensors")
    with Publisher(server.url, lambda: weights, timeout_s=30) as to:
        to.publish(version="whole")
        first = generate(server, max_tokens=NUM_TOKENS)["token_ids"]
        weights = stepped(weights, 1, share=0.2)
        if point == "undo":
            assert to.publish(version="delta").is_delta
        expected = generate(server, max_tokens=NUM_TOKENS)["token_ids"]
        assert (expected == first) == (point != "undo")
        family = [psutil.Process(server.pid)]
        family += family[0].children(recursive=True)
        at = IN_FLIP if point == "undo" else point
        trap.arm(at, f"SIGKILL {victim}", f"{victim} of 2")
        answers: list[Answer] = []
        with ThreadPoolExecutor(1) as pool:
            speaking = pool.submit(says, server, answers)
            with pytest.raises(Exception):  # noqa: B017 (of any kind)
                to.rollback() if point == "undo" else to.publish(version="delta")
            speaking.result(timeout=60)
    assert trap.disarm(), "the point was not reached"
    are_gone(family)
    nothing_came(known)
    assert versions(answers) <= {"whole", "delta"}
    served = "delta" if point == "undo" else "whole"
    assert all(begins_as(answer, expected, served) for answer in answers)
