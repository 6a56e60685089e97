"""Drafters on two ranks: each has its part of them, and all of it changes, or none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.script import run_script
from tests.support.models.families import cpu_options, gpu_options
from tests.support.models.tiny_drafters import (
    MTP,
    MTP_KINDS,
    drafting,
    make_drafter,
    make_mtp,
    mtp_options,
)
from vllm.inflight.update import drafters

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CASES = ("eagle", "draft_model", "eagle3", "mimo", "glm", "deepseek", "ernie")
INSIDE = "model.layers.0.mlp.down_proj.weight"
"""What a matrix of such a head is called, once it is loaded."""
SIZE = {"hidden": 256} if torch.cuda.is_available() else {}
"""What kernels of GPUs take."""


def options(family: str) -> dict[str, Any]:
    """Of an engine: in float32, where all of its kernels have that."""
    if torch.cuda.is_available():
        return gpu_options(family)
    return {"dtype": "float32"} | cpu_options(family)


def with_drafters(
    root: Path, checkpoint: Callable[..., Path], method: str
) -> dict[str, Any]:
    models = [checkpoint(seed, family="llama", **SIZE) for seed in (0, 1)]
    return {
        "models": [str(model) for model in models],
        "drafters": [
            str(make_drafter(root / f"{seed}", seed, models[0], method))
            for seed in (5, 6)
        ],
        "config": drafting(method, root),
        "drafter": {
            "eagle": "layers.0.mlp.down_proj.weight",
            "eagle3": "midlayer.mlp.down_proj.weight",
            "draft_model": INSIDE,
        }[method],
        "options": options("llama"),
    }


def with_mtp(root: Path, name: str) -> dict[str, Any]:
    kind = MTP_KINDS[name]
    drafts = mtp_options(kind.family)["speculative_config"]
    return {
        "models": [
            str(make_mtp(root / f"{seed}", kind, seed, 5 + seed, **SIZE))
            for seed in (0, 1)
        ],
        "drafters": [],
        "config": MTP if torch.cuda.is_available() else drafts,
        "drafter": f"{kind.layer}{kind.block}self_attn.o_proj.weight",
        "mtp": f"{kind.layer}*",
        "options": options(kind.family),
    }


@pytest.fixture(scope="module", params=CASES)
def seen(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """One run of the script, for all tests of a case."""
    name, root = request.param, tmp_path_factory.mktemp(request.param)
    is_mtp = name in MTP_KINDS
    case = with_mtp(root, name) if is_mtp else with_drafters(root, checkpoint, name)
    told = run_script("drafted_ranks", json.dumps(case))
    name = case["drafter"]
    return told | {"names": {name} if is_mtp else {drafters(name), drafters(INSIDE)}}


def test_model_and_drafter_equal_a_fresh_engines_on_both_ranks(
    seen: dict[str, Any],
) -> None:
    before, expected = seen["before"], seen["expected"]
    for part in ("tokens", "model", "drafter"):
        assert before[part] != expected[part]
    assert before["drafter"][0] != before["drafter"][1], "each rank has its part"
    assert seen["commits"] == [expected] * 4
    assert seen["others"] == [before] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_tensor_of_the_drafter_on_one_rank_changes_no_rank(
    seen: dict[str, Any], rank: int
) -> None:
    for named in seen[f"rank {rank}"]:
        assert named
        assert set(named) <= seen["names"]
    assert seen["after faults"] == seen["before"]
    assert seen["label after faults"] == "default"


def test_the_drafter_alone_changes_on_both_ranks(seen: dict[str, Any]) -> None:
    """What is said may differ by a rounding, as steps do whose drafts are taken."""
    assert seen["alone"]["model"] == seen["before"]["model"]
    assert seen["alone"]["drafter"] == seen["expected"]["drafter"]
