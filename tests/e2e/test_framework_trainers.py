"""Trainers of frameworks, with their packages' own transports and worker extensions.

The trainer is a process of its own. On the CPU build the store of OpenRLHF's group is
in the place of NCCL. verl, and OpenRLHF in the place of CUDA IPC, send through shared
memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.frameworks.packages import OWN
from benchmarks.frameworks.trainer import SENDERS
from tests.support.engines.script import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FRAMEWORKS = ["openrlhf", "openrlhf_ipc", "verl", "prime_rl"]
Seen = dict[str, Any]


@pytest.fixture(scope="session")
def in_float32(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Two checkpoints in float32, in which versions are told apart from noise."""
    root = tmp_path_factory.mktemp("float32")
    folders = []
    for seed in (0, 1):
        plain, folder = checkpoint(seed, hidden=256, layers=3), root / str(seed)
        folder.mkdir()
        for file in plain.iterdir():
            if file.suffix == ".safetensors":
                tensors = {name: t.float() for name, t in load_file(file).items()}
                save_file(tensors, folder / file.name, metadata={"format": "pt"})
            else:
                (folder / file.name).write_bytes(file.read_bytes())
        folders.append(folder)
    return folders


def run(folders: list[Path], num_ranks: int, frameworks: list[str]) -> Seen:
    """What an engine serves that these frameworks' trainers update in turn."""
    for framework in frameworks:
        folder = OWN[SENDERS[framework].package].folder
        assert folder.is_dir(), "run `make test-frameworks`"
    room = "tests.support.frameworks"
    # Pieces of verl's buffer are smaller than the model.
    env = {"BENCH_BUCKET_MB": "1"}
    arguments = *folders, num_ranks, *frameworks
    return run_script("trained", *arguments, room=room, env=env, spawned=True)


@pytest.fixture(scope="module")
def of_one_rank(in_float32: list[Path]) -> Seen:
    return run(in_float32, 1, FRAMEWORKS)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_frameworks_own_trainer_updates_an_engine_under_load(
    in_float32: list[Path],
    of_one_rank: Seen,
    framework: str,
    record_property: Callable[[str, object], None],
) -> None:
    check(of_one_rank, framework, in_float32)
    record_property("digest", "equal")


def test_verls_own_trainer_updates_two_ranks_under_load(in_float32: list[Path]) -> None:
    found = run(in_float32, 2, ["verl"])
    check(found, "verl", in_float32, num_ranks=2)
    check_fresh(found, in_float32, num_ranks=2)


def test_a_trainer_that_is_late_fails_alone(of_one_rank: Seen) -> None:
    check_late(of_one_rank)


def check(
    found: Seen, framework: str, folders: list[Path], *, num_ranks: int = 1
) -> None:
    """Fail if anything else was served than the versions that a trainer has sent."""
    seen = found[framework]
    updates = seen["updates"]
    epochs = [update["epoch"] for update in updates]
    assert epochs == list(range(epochs[0], epochs[0] + len(epochs)))
    labels = [update["weight_version"] for update in updates]
    if framework == "prime_rl":
        assert labels == [folders[n % 2 == 0].name for n in range(len(labels))]
    else:
        assert labels == [f"update-{epoch}" for epoch in epochs]
    assert min(update["steps"] for update in updates) > 0, "decoding stood still"
    assert updates[-1]["digest"] == updates[0]["digest"] == found["digest"]
    assert seen["not of files"] == [[]] * num_ranks
    assert found["before"] == seen["rolled back"] != seen["after"] == found["of files"]
    assert seen["borders"] > 8, "the commits did not come under load"
    assert seen["mismatches"] == []


def check_fresh(found: Seen, folders: list[Path], *, num_ranks: int) -> None:
    """Fail unless an engine that starts with the new weights says what `found` said."""
    new_first = folders[::-1]
    assert run(new_first, num_ranks, [])["before"] == found["of files"]


def check_late(found: Seen) -> None:
    """Fail if a trainer that sends nothing for a while hurts anything else."""
    seen = found["openrlhf"]
    late = seen["late"]
    assert late["same"] and late["is label kept"] and late["rounds"] > 1
    assert "deadline" in late["error"], late
    assert seen["after late"] == found["of files"]
