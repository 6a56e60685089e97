"""Deltas in formats of frameworks' own, by their own files, on a real engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks.packages import OWN
from tests.support.engines.script import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def seen_by(script: str, package: str, *folders: Path) -> dict[str, Any]:
    assert OWN[package].folder.is_dir(), "run `make test-frameworks`"
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return run_script(script, *folders, room="tests.support.frameworks", env=env)


def test_a_delta_of_verl_is_rejected_by_name_and_changes_nothing(
    checkpoint: Callable[..., Path],
) -> None:
    """Its extension calls a phase of an update on one worker."""
    seen = seen_by("verl_deltas", "verl", checkpoint(0), checkpoint(1))
    begun, asked, ended = seen["raised"].values()
    assert begun is None
    assert "Worker.update_weights was called inside a call of the workers" in asked
    assert "missing" in ended
    assert (seen["same"], seen["active"], seen["back"]) == (True, None, "new")


def test_a_delta_of_nemo_rl_writes_in_place_and_has_an_honest_label(
    checkpoint: Callable[..., Path],
) -> None:
    """Its preparation calls the loader of the live model, and counts as a write too."""
    seen = seen_by("nemo_rl_deltas", "nemo_rl", checkpoint(0), checkpoint(1))
    assert seen["reply"] and seen["is new"]
    assert (seen["epochs"], seen["digest"]) == (1, None)
    labels = [f"untracked-{seen['epoch'] - 1}", f"untracked-{seen['epoch']}"]
    assert [seen["prepared"], seen["label"]] == labels
