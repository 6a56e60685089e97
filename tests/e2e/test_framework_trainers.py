"""Trainers of frameworks, with their packages' own senders and worker extensions.

The trainer is a process of its own. On the CPU build the store of OpenRLHF's group is
in the place of NCCL, and verl sends through shared memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CASES = [
    ("openrlhf", 1, "obey"),
    ("verl", 1, "obey"),
    ("prime_rl", 1, "absorb"),
    ("verl", 2, "obey"),
]


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


@pytest.mark.parametrize(("framework", "num_ranks", "pauses"), CASES)
def test_a_frameworks_own_trainer_updates_an_engine_under_load(
    in_float32: list[Path], framework: str, num_ranks: int, pauses: str
) -> None:
    check(in_float32, framework, num_ranks, pauses)


def check(
    folders: list[Path],
    framework: str,
    num_ranks: int,
    pauses: str,
    fresh: list[list[int]] | None = None,
) -> dict[str, Any]:
    """Let a trainer update an engine under load; fails if anything else is served.

    Args:
        folders: the old and the new checkpoint.
        framework: whose trainer and extension.
        num_ranks: of the engine.
        pauses: see `--inflight-pauses`.
        fresh: what an engine that was started on the new checkpoint says.

    """
    assert OWN[framework].folder.is_dir(), "run `make test-frameworks`"
    room = "tests.support.frameworks"
    arguments = framework, *folders, num_ranks, pauses
    # Pieces of verl's buffer are smaller than the model.
    env = {"BENCH_BUCKET_MB": "1"}
    seen = run_script("trained", *arguments, room=room, env=env, spawned=True)
    updates = seen["updates"]
    epochs = [update["epoch"] for update in updates]
    assert epochs == list(range(epochs[0], epochs[0] + len(epochs)))
    labels = [update["weight_version"] for update in updates]
    if framework == "prime_rl":
        assert labels == [folders[n % 2 == 0].name for n in range(len(labels))]
    else:
        assert labels == [f"update-{epoch}" for epoch in epochs]
    assert min(update["steps"] for update in updates) > 0, "decoding stood still"
    assert updates[-1]["digest"] == updates[0]["digest"] == seen["digest of files"]
    assert seen["not of files"] == [[]] * num_ranks
    assert seen["before"] == seen["rolled back"] != seen["after"]
    if fresh is not None:
        assert seen["after"] == fresh
    assert seen["spanning"] > 8, "the commits did not come under load"
    assert seen["mismatches"] == []
    if framework == "openrlhf":
        late = seen["late"]
        assert late["same"] and late["is label kept"] and late["rounds"] > 1
        assert "deadline" in late["error"], late
        assert seen["said after late"] == seen["after"]
    return seen
