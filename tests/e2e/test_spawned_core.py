"""An engine core in a process that is spawned, as vLLM starts it beside CUDA.

Such a process imports vLLM anew, and loads its plugins while the constructor of the
engine core already runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_fed_engines import feed
from tests.support.engines.probe import greedy
from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine


def test_an_update_and_a_rollback_in_a_spawned_engine_core_equal_fresh_engines(
    start: Callable[..., Any], old: Path, new: Path, fresh: list[list[int]]
) -> None:
    seen = run_script("spawned", old, new, spawned=True)
    assert seen == {"new": fresh, "old": greedy(start(old))}


@pytest.mark.slow
def test_two_data_parallel_engines_in_spawned_processes_equal_fresh_engines(
    old: Path, new: Path
) -> None:
    env = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    feed("two_engines", old, new, "files", "inflight_gloo", env=env)
