"""Other executors than vLLM's own processes: all ranks change between two steps, or
none may.

Ray is not among the requirements; where it is not installed, its tests are skipped.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_pipeline_parallel import (
    every_step_is_of_one_version,
    every_token_is_of_its_version,
)
from tests.support.engines.probe import greedy
from tests.support.engines.script import run_script
from tests.support.ports import free_port
from tests.support.shared_memory import sweep
from vllm.inflight.trainer import Publisher

pytestmark = pytest.mark.engine

GRAPH, QUEUE = "0", "1"
CASES = {
    "graph, tensor parallel": (GRAPH, "tensor"),
    # Here, and here alone, steps are in flight whenever a version is committed.
    "graph, pipeline": (GRAPH, "pipeline"),
    "queue, tensor parallel": (QUEUE, "tensor"),
}
"""Which of Ray's executors, and how there come to be two ranks."""


@pytest.fixture(scope="module")
def paths(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {label: checkpoint(seed) for seed, label in enumerate("ab")}


@pytest.fixture(scope="module", params=CASES)
def seen(request: pytest.FixtureRequest, paths: dict[str, Path]) -> dict[str, Any]:
    """One run of the script, for all tests of a case."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    executor, parallel = CASES[request.param]
    env = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": executor}
    if not torch.cuda.is_available():
        # What stages hand on goes through NCCL else.
        env["VLLM_USE_RAY_WRAPPED_PP_COMM"] = "0"
        env["VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE"] = "shm"
    return run_script("rayed", *paths.values(), parallel, env=env, spawned=True)


def test_rays_ranks_commit_together_and_roll_back(seen: dict[str, Any]) -> None:
    assert seen["whole"] == {"code": "committed"}
    assert seen["after commit"] != seen["before"]
    assert seen["after rollback"] == seen["before"]


def test_no_rank_on_ray_commits_an_update_that_one_rank_rejects(
    seen: dict[str, Any],
) -> None:
    for rank in (0, 1):
        assert seen[f"rank {rank} poisoned"]["code"] == "weights_mismatch"
        assert seen[f"rank {rank} broken"]["code"] == "engine_fault"
    assert seen["both ranks poisoned"]["code"] == "weights_mismatch"
    assert seen["after refusals"] == seen["before"]
    assert seen["label after refusals"] == "default"


def test_every_step_on_ray_without_a_commit_is_of_the_version_served(
    seen: dict[str, Any], paths: dict[str, Path]
) -> None:
    """If not, the commits have nothing to do with what the next test finds."""
    every_token_is_of_its_version(seen["steady streams"], paths)


def test_every_step_of_24_commits_under_load_on_ray_is_of_one_version(
    seen: dict[str, Any], paths: dict[str, Path]
) -> None:
    every_step_is_of_one_version(seen["streams"], paths)
    assert seen["after many commits"] == seen["before"]["tokens"]


def launched(paths: dict[str, Path], num_ranks: int) -> list[dict[str, Any]]:
    """What two processes of an external launcher tell, with so many ranks an engine."""
    # Under such a launcher vLLM has one name for its ranks' exchange, whoever they are,
    # and does not start where a run that was ended has left it.
    sweep(0, ["-tp:*-cpushm_*"])
    port = str(free_port())

    def run(rank: str) -> dict[str, Any]:
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return run_script("launched", *paths.values(), num_ranks, env=env)

    with ThreadPoolExecutor() as both:
        return list(both.map(run, "01"))


def test_ranks_of_an_external_launcher_serve_and_are_rejected_alike(
    paths: dict[str, Path],
) -> None:
    """Each is an engine of its own, and would change alone."""
    first, second = launched(paths, 2)
    assert first == second
    assert first["code"] == "staging_unavailable"
    assert first["after"] == first["before"]


def test_engines_of_one_rank_under_an_external_launcher_all_commit(
    paths: dict[str, Path],
) -> None:
    """The launcher counts the processes of all engines, each engine its own ranks."""
    seen = launched(paths, 1)
    for engine in seen:
        assert engine["code"] == "committed"
        assert engine["after"] != engine["before"]
        assert engine["rolled back"] == engine["before"]
        assert engine["ranks"] | {"rank": 0, "tp_rank": 0, "size": 1} == engine["ranks"]
    new, old = (seen[0][version] for version in ("after", "before"))
    assert [engine["after"] for engine in seen] == [new, new]
    assert [engine["lists"] for engine in seen] == [[new, new], [new, old]]


STAGINGS = ["device", "delta"] if torch.cuda.is_available() else ["auto"]


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_worker_with_a_process_of_its_own_takes_versions_and_deltas(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    staging: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank, which vLLM's default executor has in the engine core's process."""
    # A process that has computed on a CPU's threads is not to be forked.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    inflight = {"staging": staging} | ({"delta_gib": 1.0} if staging == "delta" else {})
    fresh = greedy(start(new))
    llm = start(
        old,
        distributed_executor_backend="mp",
        worker_extension_cls="tests.support.engines.transport.Extension",
        weight_transfer_config={"backend": "local"},
        additional_config={"inflight": inflight},
    )
    assert llm.collective_rpc(lambda _: os.getpid()) != [os.getpid()]
    before = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == before
    weights = load_file(new / "model.safetensors")
    with Publisher(llm, weights) as to:
        assert not to.publish().is_delta
        assert greedy(llm) == fresh
        for tensor in weights.values():
            tensor.view(-1).view(torch.int16)[::100] ^= 1
        assert to.publish().is_delta
    assert llm.verify_weights()["result"] == "equal"
    llm.rollback_weights()
    assert greedy(llm) == fresh
