"""The trace of an update tells where a step waits."""

import pytest

from benchmarks import stopwatch
from benchmarks.gpu.watch import profile, trace
from benchmarks.gpu.watch.trace import STEP, stretches, table

MS = 1_000_000


def span(name, begin, end, own, thread="MainThread"):
    return {
        "name": name,
        "thread": thread,
        "begin": int(begin * MS),
        "end": int(end * MS),
        "own": int(own * MS),
    }


def kernels(*spans):
    return stretches((name, int(b * MS), int(e * MS)) for name, b, e in spans)


def test_kernels_become_stretches_without_a_pause():
    first, second = kernels(("a", 0, 1), ("b", 1.01, 2), ("b", 1.5, 2.5), ("c", 4, 5))
    assert (first["begin"], first["end"]) == (0, 2.5 * MS)
    assert first["busy"] == 2.49 * MS  # the pause and the overlap count once
    assert list(first["names"]) == ["b", "a"]
    assert second["names"] == {"c": MS}


def test_a_step_is_a_line_and_what_happened_meanwhile_is_below_it():
    steps = [span(STEP, at, at + 2, 1.5) for at in (0, 7, 14, 30)]
    staging = span("StagingThread._receive", 8, 12, 3, "inflight-stage")
    trace = {
        "spans": [*steps, staging],
        "streams": {
            "7": kernels(("decode", 0, 6), ("decode", 7, 13), ("decode", 14, 29)),
            "20": kernels(("write", 9, 11)),
        },
        "calls": [["cudaFree", 42, 14 * MS, 20 * MS], ["cudaGraphLaunch", 1, MS, MS]],
    }
    header, *lines = table(trace)
    assert header.split() == ["at", "period", "body", "own", "gpu", "others"]
    numbers = [line.split() for line in lines]
    assert numbers[0] == ["-8.00", "7.00", "2.00", "1.50", "6.00", "0.00"]
    assert numbers[1] == ["-1.00", "7.00", "2.00", "1.50", "6.00", "2.00"]
    assert "StagingThread._receive own 3.00 inflight-stage" in lines[2]
    assert "GPU busy 2.00 write" in lines[3]
    assert numbers[4] == ["6.00", "16.00", "2.00", "1.50", "15.00", "0.00"]
    assert "cudaFree thread 42" in lines[5]
    assert len(lines) == 6


def test_steps_in_pieces_are_one_line():
    pieces = [span(STEP, 0, 1, 1), span(STEP, 1.1, 2, 0.5), span(STEP, 7, 8, 1)]
    trace = {"spans": [*pieces, span("x", 1, 2, 0)], "streams": {}, "calls": []}
    line = list(table(trace))[1]
    assert line.split()[:4] == ["-1.00", "7.00", "2.00", "1.50"]


@pytest.mark.parametrize(
    "path", sorted({*stopwatch.WATCHED, *trace.PHASES, *profile.PHASES})
)
def test_every_function_that_is_watched_exists(path):
    owner, name = stopwatch.located(path)
    assert callable(getattr(owner, name))
