"""Worker extensions of frameworks, as their packages have them, on a real engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks.packages import OWN
from tests.support.engines.mixtures import part
from tests.support.engines.script import run_script
from tests.support.frameworks.packages import JOIN, PACKS
from tests.support.models.tiny_drafters import MTP_KINDS, make_mtp

pytestmark = pytest.mark.engine

QUICK = "openrlhf", "verl", "checkpoint_engine", "swift_flattened", "areal", "skyrl"
"""One of each package that the package index has: `make test` runs them."""
LABELS = {"prime_rl_nccl": "step_1", "pipelinerl": "7"}
"""Of frameworks whose calls have a label."""
OF_FOLDER = "areal_files"
"""Its label is the name of the folder."""
SHAPES = {name: {"family": "qwen2", "hidden": 256} for name in PACKS}
"""Of models whose layers are quantised in blocks."""
OF_MTP = "verl_mtp"
"""verl on an engine that drafts with MTP layers."""
REPLIES: dict[str, list[Any]] = {
    **{name: [[True, "Success"]] for name in ("areal", "areal_files")},
    **{name: [True] for name in ("nemo_rl", "nemo_rl_zmq")},
}
"""Of methods that return something."""


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in JOIN
        if name != OF_MTP
    ],
)
def test_the_extension_of_the_package_updates_beside_decoding(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    framework: str,
    record_property: Callable[[str, object], None],
) -> None:
    assert OWN[framework].folder.is_dir(), "run `make test-frameworks`"
    shape = SHAPES.get(framework, {})
    old, new = checkpoint(0, **shape), checkpoint(1, **shape)
    seen = updated(framework, old, new, env={"ROLL_LOG_DIR": str(tmp_path)})
    assert seen["replies"] == REPLIES.get(framework, [None])
    record_property("digest", "equal")
    known = LABELS | {OF_FOLDER: new.name}
    assert seen["label"] == known.get(framework, f"update-{seen['epoch']}")


@pytest.mark.slow
@pytest.mark.lacking("0.30.0")  # vLLM's own CPU build cannot sample drafts there
@pytest.mark.parametrize("has_mtp", [True, False])
def test_verls_extension_updates_a_model_that_drafts_with_mtp_layers(
    tmp_path: Path, has_mtp: bool
) -> None:
    """Layers that its trainer does not have keep their weights."""
    kind = MTP_KINDS["mimo"]
    old = make_mtp(tmp_path / "old", kind, 0, 5)
    new = make_mtp(tmp_path / "new", kind, 1, 6 if has_mtp else 5)
    sent = new if has_mtp else Path(part(new, kind.model, tmp_path / "sent"))
    seen = updated(OF_MTP, old, new, sent)
    assert (seen["replies"], seen["label"]) == ([None], f"update-{seen['epoch']}")


def updated(framework: str, *folders: Path, env: dict[str, str] | None = None) -> Any:
    """What an engine has served that a framework has updated in one transaction."""
    in_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    seen = run_script(
        "packages",
        framework,
        *folders,
        room="tests.support.frameworks",
        env=in_process | (env or {}),
    )
    assert seen["is fresh"] and seen["is digest of files"]
    label, labels = seen["label"], seen["labels"]
    num_old = labels.count("old")
    assert 8 < num_old < len(labels)
    assert labels == ["old"] * num_old + [label] * (len(labels) - num_old)
    return seen
