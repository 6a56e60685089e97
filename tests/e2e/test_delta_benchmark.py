"""The benchmark of deltas, both arms of this package, on a tiny model without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.delta import ARMS, NUM_ROLLBACKS

ROOT = Path(__file__).parents[2]
SHARES = ["0.01", "0.05"]
NUM_UPDATES = 2


@pytest.mark.engine
@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    words = ["--shape", "tiny", "--backend", "inflight_gloo", "--arms", *ARMS]
    words += ["--shares", *SHARES, "--updates", str(NUM_UPDATES), "--streams", "8"]
    words += ["--log-gib", "0.05", "--engine", '{"max_model_len": 40960}']
    command = [sys.executable, "-m", "benchmarks.gpu.delta", *words]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]
    report: dict[str, Any] = json.loads((tmp_path / "gpu-delta-tiny.json").read_text())
    for rounds in report["arms"].values():
        assert list(rounds) == ["whole", *SHARES, "whole again", "rollbacks"]
        assert all(rounds[share]["told_is_delta"] == 1 for share in SHARES)
        assert len(rounds["rollbacks"]["gaps"]) == NUM_ROLLBACKS
        for figures in rounds.values():
            assert figures["update_s"] > 0 and figures["told_commit_ms"] > 0
    assert report["arms"].keys() == set(ARMS)
