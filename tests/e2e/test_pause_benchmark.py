"""The benchmark of the pause modes: its arithmetic, and all of it on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.pause_modes import (
    IN_PLACE,
    RESEND,
    RETRACT,
    Change,
    figures,
    num_streams,
)

ROOT = Path(__file__).parents[2]


def test_the_benchmark_computes_its_figures_from_token_arrivals() -> None:
    # Two streams with a token every 0.1 s each; the change stops one of them for 1 s.
    steady = [(n / 10, 1) for n in range(1, 31)]
    stopped = [(at, n) for at, n in steady if not 1.05 < at < 2.05]
    change = Change(0.05, 1.05, 3.05, 700, [1.1, 2.1], [steady, stopped])
    found = figures(change)
    assert found.tokens_per_s == pytest.approx(20)
    assert found.window_s == pytest.approx(2)
    assert found.lost_tokens == pytest.approx(10)
    assert found.lost_tokens_per_s == pytest.approx(5)
    assert found.lost_share == pytest.approx(0.25)
    assert found.next_token_median_s == pytest.approx(0.55)
    assert found.next_token_max_s == pytest.approx(1.05)
    assert found.num_recomputed == 700


@pytest.mark.parametrize(
    ("context", "expected"), [(1024, 16), (32768, 5), (400_000, 1)]
)
def test_as_many_streams_as_have_room(context: int, expected: int) -> None:
    assert num_streams(context, 200_000, 16) == expected


@pytest.mark.engine
@pytest.mark.slow
def test_the_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--shape", "tiny", "--contexts", "64", "512"]
    command = [sys.executable, "-m", "benchmarks.gpu.pause_modes", *words]
    done = subprocess.run(
        [*command, "--streams", "4", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads((tmp_path / "gpu-pause-modes.json").read_text())
    for context, found in report["contexts"].items():
        rows = found["modes"]
        assert found["streams"] == 4
        assert rows[IN_PLACE]["num_recomputed"] == 0
        # Prompts, and all tokens that had come.
        assert rows[RETRACT]["num_recomputed"] > 4 * int(context)
        assert rows[RESEND]["num_recomputed"] > rows[RETRACT]["num_recomputed"]
        for row in rows.values():
            assert 0 < row["next_token_median_s"] <= row["next_token_max_s"]
            assert row["tokens_per_s"] > 0
