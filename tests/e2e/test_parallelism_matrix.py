"""Interfaces and kinds of parallelism: pauses and updates behave the same in all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import gentle
from tests.support.engines.matrix import NUM_REQUESTS, NUM_TOKENS, Served, both
from tests.support.engines.script import run_script
from tests.support.serving import Server

pytestmark = pytest.mark.engine

SHAPES = {"one rank": (1, 1), "two data-parallel": (1, 2), "two ranks": (2, 1)}


def over_http(tp: int, dp: int, old: Path, new: Path) -> Any:
    parallel = ("--tensor-parallel-size", str(tp), "--data-parallel-size", str(dp))
    flags = (*parallel, "--logits-processors", gentle.NAME)
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp * dp > 1 else {}
    with Server(old, "--dtype", "float32", *flags, env=bind) as server:
        return both(Served(server), str(old), str(new))


QUICK = {("LLM", "one rank")}
"""Two ranks of two engines over HTTP are in test_four_ranks.py."""

# Of dense models upstream refuses data parallelism offline.
CELLS = [
    pytest.param(door, shape, marks=() if (door, shape) in QUICK else pytest.mark.slow)
    for door in ("HTTP", "AsyncLLM", "LLM")
    for shape in SHAPES
    if (door, shape) != ("LLM", "two data-parallel")
]


@pytest.mark.parametrize(("door", "shape"), CELLS)
def test_a_pause_and_an_update_during_requests_work_in_every_interface(
    checkpoint: Callable[..., Path], door: str, shape: str
) -> None:
    tp, dp = SHAPES[shape]
    old, new = checkpoint(0), checkpoint(1)
    if door == "HTTP":
        seen = over_http(tp, dp, old, new)
    else:
        seen = run_script("matrix", door, tp, dp, old, new)
    for mode, label, before in (("in_place", "new", "old"), ("retract", "old", "new")):
        life = seen[mode]
        assert life["is_paused"] is True
        assert life["paused"] == NUM_REQUESTS, "the pause came when they had ended"
        assert life["label"] == label
        assert life["counts"] == [NUM_TOKENS] * NUM_REQUESTS
        assert life["versions"] == [[before, label]] * NUM_REQUESTS
    # Retracted requests hold no KV of the weights before: they go on as if begun anew.
    assert seen["retract"]["same as begun anew"] == [True] * NUM_REQUESTS
    assert not any(seen["in_place"]["same as begun anew"])
