"""The arithmetic of the benchmarks: figures of records that are easy to check."""

from pathlib import Path

import pytest

from benchmarks.delta.chart import draw
from benchmarks.figures import AFTER_S, kept_share, steady, update_figures
from benchmarks.gpu.delta import ARMS, SPARSE
from benchmarks.record import UPSTREAM, Record, Update

STEP_S, SLOWER_S = 0.01, 0.02


def test_decoding_before_the_first_update_is_told_apart_from_all_of_it() -> None:
    """Streams are longer after an update, and longer streams take longer steps."""
    before = [10 + STEP_S * number for number in range(1, 101)]
    after = [11.5 + AFTER_S + SLOWER_S * number for number in range(1, 51)]
    arrivals = [(at, 2) for at in [*before, *after]]
    updated = Update(before[-1], 11.5)
    record = Record([arrivals], before[0] - STEP_S, after[-1], [updated])
    found = steady([record])
    assert found["tokens_per_s_before"] == pytest.approx(2 / STEP_S)
    assert found["tokens_per_s"] == pytest.approx(2 * 150 / 2, rel=1e-6)
    assert found["context_tokens"] == pytest.approx(sum(range(2, 301, 2)) / 150)
    assert len(update_figures(record)) == 1


def test_the_tokens_of_a_round_of_updates_are_compared_with_decoding_alone() -> None:
    """Two updates a second apart, and each of them stops decoding for 0.1 s."""
    updates = [Update(10.0, 10.1), Update(11.0, 11.1)]
    times = [STEP_S * number + 9 for number in range(1, 301)]
    alone = [at for at in times if not any(u.start < at <= u.end for u in updates)]
    record = Record([[(at, 1) for at in alone]], 9.0, 12.0, updates)
    assert kept_share(record) == pytest.approx(0.9, rel=0.02)


def test_every_arm_of_a_comparison_of_deltas_is_drawn(tmp_path: Path) -> None:
    figures = {"told_bytes": 1e6, "told_total": 0.06, "update_s": 0.07, "lost_s": 0.02}
    rounds = {title: figures for title in ("whole", "0.001", "0.01", "auto 0.03")}
    arms = dict.fromkeys([*ARMS, UPSTREAM, SPARSE], rounds)
    draw({"arms": arms}, tmp_path / "arms.png")
    assert (tmp_path / "arms.png").stat().st_size > 10_000
