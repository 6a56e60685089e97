"""Worker extensions of frameworks, as their packages have them, on a real engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import run_script
from tests.support.frameworks.packages import JOIN, PACKS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LABELS = {"prime_rl_nccl": "step_1", "pipelinerl": "7"}
"""Of frameworks whose calls have a label."""
OF_FOLDER = "areal_files"
"""Its label is the name of the folder."""
SHAPES = {name: {"family": "qwen2", "hidden": 256} for name in PACKS}
"""Of models whose layers are quantised in blocks."""
REPLIES: dict[str, list[Any]] = {
    **{name: [[True, "Success"]] for name in ("areal", "areal_files")},
    **{name: [True] for name in ("nemo_rl", "nemo_rl_zmq")},
}
"""Of methods that return something."""


@pytest.mark.parametrize("framework", JOIN)
def test_the_extension_of_the_package_updates_beside_decoding(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    framework: str,
    record_property: Callable[[str, object], None],
) -> None:
    assert OWN[framework].folder.is_dir(), "run `make test-frameworks`"
    shape = SHAPES.get(framework, {})
    old, new = checkpoint(0, **shape), checkpoint(1, **shape)
    seen = run_script(
        "packages",
        framework,
        old,
        new,
        room="tests.support.frameworks",
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "ROLL_LOG_DIR": str(tmp_path)},
    )
    assert seen["replies"] == REPLIES.get(framework, [None])
    assert seen["is fresh"] and seen["is digest of files"]
    record_property("digest", "equal")
    label, labels = seen["label"], seen["labels"]
    known = LABELS | {OF_FOLDER: new.name}
    assert label == known.get(framework, f"update-{seen['epoch']}")
    num_old = labels.count("old")
    assert 8 < num_old < len(labels)
    assert labels == ["old"] * num_old + [label] * (len(labels) - num_old)
