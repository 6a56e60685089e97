"""The benchmarks of deltas on tiny models without a GPU: the arms of this package."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.delta import ARMS, DEVICE, NUM_ROLLBACKS

ROOT = Path(__file__).parents[2]
SHARES = ["0.01", "0.05"]
NUM_UPDATES = 2


pytestmark = [pytest.mark.engine, pytest.mark.slow]


def rounds(folder: Path, arms: Sequence[str], *more: str, **engine: int) -> Any:
    """Run the benchmark; the rounds of each arm, which have all that was asked for."""
    words = ["--shape", "tiny", "--backend", "inflight_gloo", "--arms", *arms]
    words += ["--shares", *SHARES, "--updates", str(NUM_UPDATES), "--log-gib", "0.05"]
    words += ["--engine", json.dumps({"max_model_len": 40960} | engine), *more]
    command = [sys.executable, "-m", "benchmarks.gpu.delta", *words]
    done = subprocess.run(
        [*command, "--out", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    report: dict[str, Any] = json.loads((folder / "gpu-delta-tiny.json").read_text())
    assert report["arms"].keys() == set(arms)
    for found in report["arms"].values():
        assert list(found) == ["whole", *SHARES, "whole again", "rollbacks"]
        assert all(found[share]["told_is_delta"] == 1 for share in SHARES)
        assert len(found["rollbacks"]["gaps"]) == NUM_ROLLBACKS
        for figures in found.values():
            assert figures["update_s"] > 0 and figures["told_commit_ms"] > 0
    return report["arms"]


def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    rounds(tmp_path, ARMS, "--streams", "8")


def test_ranks_of_its_trainer_find_what_has_changed_in_their_shards(
    tmp_path: Path,
) -> None:
    ranks = "--ranks", "2", "--trainer-ranks", "2", "--streams", "4"
    for found in rounds(tmp_path, ARMS, *ranks).values():
        for share in SHARES:
            # Rank 1 has half of the weights, and brings its changes alone.
            gathered = found[share]["told_gathered_bytes"]
            assert 0 < gathered < found[share]["told_bytes"]


def test_engines_of_one_group_tell_how_far_apart_they_commit(tmp_path: Path) -> None:
    streams = "--ranks", "2", "--streams", "4"
    found = rounds(tmp_path, [DEVICE], *streams, data_parallel_size=2)[DEVICE]
    for title in ("whole", *SHARES, "whole again"):
        figures = found[title]
        assert 0 <= figures["told_skew_ms"] < 1e3 * figures["update_s"]


def test_steps_of_grpo_are_compared_with_those_before(tmp_path: Path) -> None:
    words = ["--rates", "2e-4", "--steps", "2", "--pretrain-steps", "60"]
    command = [sys.executable, "-m", "benchmarks.delta.grpo", *words]
    file = tmp_path / "grpo.json"
    done = subprocess.run(
        [*command, "--out", str(file)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    report: dict[str, Any] = json.loads(file.read_text())
    found = report["0.0002"]
    assert len(found["rewards"]) == len(found["shares"]) == 2
    # A step without a reward has no gradient, but AdamW goes on.
    assert 0 < found["all"]["share"] < 1
