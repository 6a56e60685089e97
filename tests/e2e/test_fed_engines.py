"""Trainers and files feed an engine while requests run, in every kind of engine.

After each version and each rollback, and after one rank has refused its part, the
digests of every rank are those of a fresh load. Over gloo here; tests/gpu has NCCL and
lent memory.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.fed_engine import LENGTH
from tests.support.engines.script import run_script

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_ENGINES = {"two_engines": 2, "seven_engines": 7}
"""Of the kinds that have more than one."""
CODES = {"files": "malformed"}
"""Of a refusal; other sources send a name that the model does not know."""


def feed(
    kind: str, old: Path, new: Path, *sources: str, env: dict[str, str] | None = None
) -> None:
    """Feed an engine of this kind from each source, and check all that is seen.

    With an `env`, the script is a process of its own, forked from none of the tests'.
    """
    spawned = env is not None
    seen = run_script("fed_engine", kind, old, new, *sources, env=env, spawned=spawned)
    num_engines = NUM_ENGINES.get(kind, 1)
    of_new, of_old = seen["fresh"] * num_engines, seen["old"]
    for rank, before in zip(of_new, of_old, strict=True):
        assert rank != before and rank.keys() == before.keys()
    assert of_old == of_old[: len(seen["fresh"])] * num_engines
    assert seen["tokens"] != seen["old tokens"]
    for source in sources:
        told: dict[str, Any] = seen[source]
        for moment in ("sent", "sent again"):
            assert told[moment] == of_new, (source, moment)
        for moment in ("rolled back", "after a refusal", "rolled back again"):
            assert told[moment] == of_old, (source, moment)
        assert told["refused"] == CODES.get(source, "weights_mismatch"), source
        assert told["tokens"] == seen["tokens"], source
        assert told["old tokens"] == seen["old tokens"], source
        assert told["lengths"] == [LENGTH], f"{source}: a request lost tokens"
        assert told["versions"] > 1, f"{source}: no request lived through a version"


@pytest.mark.parametrize("kind", ["llm", "async_llm", "two_engines", "two_ranks"])
def test_every_rank_serves_the_weights_from_files_and_from_a_trainer(
    old: Path, new: Path, kind: str
) -> None:
    feed(kind, old, new, "files", "inflight_gloo")


def test_two_data_parallel_engines_in_spawned_processes_equal_fresh_engines(
    old: Path, new: Path
) -> None:
    env = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    feed("two_engines", old, new, "files", "inflight_gloo", env=env)
