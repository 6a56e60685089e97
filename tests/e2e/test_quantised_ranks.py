"""Quantised models on two ranks: each processes its part, and both change or none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_quantised import COMPILED
from tests.support.engines.quantised_ranks import SCALE, WEIGHT
from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine

TENSOR = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2}
LOGGED = {
    "additional_config": {"inflight": {"staging": "delta", "delta_gib": 0.02}},
    "worker_extension_cls": "tests.support.engines.unpacked_ranks.Unpacked",
}
"""Delta staging."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", TENSOR),
    "fp8-logged": ("fp8-channel", TENSOR | LOGGED),
}
SLOW = {
    "fp8": ("fp8-channel", TENSOR),
    "int8-compiled": ("int8", TENSOR | COMPILED),
    "fp8-compiled": ("fp8-channel", TENSOR | COMPILED),
    "int8-stages": ("int8", STAGES),
    "fp8-logged-stages": ("fp8-channel", STAGES | LOGGED),
}


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
)
def seen(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path]
) -> dict[str, Any]:
    """One run of the script, for all tests of a case."""
    kind, options = (CASES | SLOW)[request.param]
    old, new = (checkpoint(seed, kind) for seed in (0, 1))
    told = run_script("quantised_ranks", old, new, json.dumps(options))
    return told | {"is staged": options.keys() >= STAGES.keys()}


def test_two_ranks_equal_a_fresh_engine_after_every_commit_and_rollback(
    seen: dict[str, Any],
) -> None:
    assert seen["before"][0] != seen["expected"][0]
    assert seen["commits"] == [seen["expected"]] * 4
    assert seen["others"] == [seen["before"]] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_tensor_on_one_rank_leaves_the_old_version_on_both(
    seen: dict[str, Any], rank: int
) -> None:
    # The first stage has no use for it: that it is short only the votes tell. Its shape
    # is known there all the same, from the checkpoint that the engine was started from.
    named = [] if seen["is staged"] and rank == 0 else [WEIGHT]
    assert seen[f"rank {rank}"] == {
        "reshaped": [WEIGHT],
        "poisoned": [SCALE],
        "short": named,
        "broken": "engine_fault",
    }
    assert seen[f"after rank {rank}"] == seen["before"]
    assert seen[f"label after rank {rank}"] == "default"


def test_a_subset_of_whole_layers_is_carried_over_on_both(
    seen: dict[str, Any],
) -> None:
    assert seen["subset"] == seen["mixture"]
    assert seen["mixture"] not in (seen["before"], seen["expected"])
