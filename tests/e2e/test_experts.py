"""Mixture-of-experts models: experts are packed anew at every update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engines.probe import commits_and_rollbacks, greedy
from tests.support.engines.script import run_script
from vllm.inflight.api.control.core_client import run_sync
from vllm.inflight.api.control.methods import control_of
from vllm.inflight.calls import ReadRows
from vllm.inflight.errors import Malformed, WeightsMismatch
from vllm.inflight.worker.model.kinds import moe

pytestmark = pytest.mark.engine

SHAPE = {"family": "qwen3_moe"}
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {}),
        pytest.param("qwen3_moe", {"enforce_eager": False}, marks=pytest.mark.slow),
    ],
    ids=["mixtral", "qwen3_moe-compiled"],
)
def test_experts_equal_a_fresh_engine_after_every_commit_and_rollback(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    family: str,
    options: dict[str, Any],
) -> None:
    old, new = checkpoint(0, family=family), checkpoint(1, family=family)
    fresh = greedy(start(new, **options))
    commits_and_rollbacks(start(old, **options), old, new, fresh)


def test_an_expert_that_is_missing_is_named(
    llm: Any, fresh: list[list[int]], old: Path, new: Path, tmp_path: Path
) -> None:
    before = greedy(llm)
    short, odd = spoilt(new, tmp_path)
    with pytest.raises(WeightsMismatch, match="missing") as refusal:
        llm.update_weights_from_disk(str(short))
    assert refusal.value.tensors == [EXPERT]
    with pytest.raises(WeightsMismatch, match=r"experts\.9\.up_proj"):
        llm.update_weights_from_disk(str(odd))
    assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh


def test_a_read_of_an_expert_is_rejected_with_the_name_of_its_stacked_parameter(
    llm: Any,
) -> None:
    with pytest.raises(Malformed, match=r"1\S*\.w13_weight") as refusal:
        run_sync(control_of(llm).ask(ReadRows(EXPERT, 2)))
    stacked = str(refusal.value).split("'")[3]
    (reply,) = run_sync(control_of(llm).ask(ReadRows(stacked, 2)))
    assert len(reply["rows"]) == 2


def spoilt(checkpoint: Path, folder: Path) -> tuple[Path, Path]:
    """A checkpoint without one of its experts, and one with an expert too many."""
    short, odd = folder / "short.safetensors", folder / "odd.safetensors"
    tensors = load_file(checkpoint / "model.safetensors")
    expert = tensors.pop(EXPERT)
    save_file(tensors, short)
    tensors |= {EXPERT: expert, EXPERT.replace("experts.5", "experts.9"): expert + 0}
    save_file(tensors, odd)
    return short, odd


def test_experts_shared_out_over_two_ranks_are_exchanged_on_both(
    old: Path, new: Path, tmp_path: Path
) -> None:
    seen = run_script("shared_experts", old, new, *spoilt(new, tmp_path))
    # What is cut is refused by its name, and is no fault of the engine.
    assert len(seen["unread"]) == 4
    for name, error in seen["unread"].items():
        assert (error["code"], name in error["message"]) == ("malformed", True)
    # Each rank has experts of its own.
    assert seen["fresh"][0] != seen["fresh"][1]
    assert seen["after commit"] == seen["fresh"]
    assert seen["before"] != seen["fresh"]
    assert seen["after rollback"] == seen["after refusals"] == seen["before"]
    assert seen["short"][1:] == [EXPERT]
    assert "experts.9.up_proj" in seen["odd"][0]


def test_an_update_that_keeps_the_kernels_of_upstream_serves_wrong_experts(
    llm: Any, fresh: list[list[int]], new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        # Upstream's way: copied over the packed ones as they come.
        patched.setattr(moe, "forget_kernels", lambda module: None)
        llm.update_weights_from_disk(str(new), "not packed")
        assert greedy(llm) != fresh
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
