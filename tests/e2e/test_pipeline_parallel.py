"""Pipeline parallelism: all stages change between two steps, or none.

Two batches are in flight here, each in another stage, whenever a version is
committed.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.test_tearing import mismatches
from tests.support.engines.reference import Reference
from tests.support.engines.script import run_script

pytestmark = pytest.mark.engine

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    # Its loader looks names up as they come, so a stage cannot know the others'.
    "tied-bloom": ("eager", 1, {"family": "bloom", "tied": True}),
    "two-ranks-each": ("eager", 2, {}),
}
"""How it runs, tensor-parallel size, and shape of the model."""
NOISE = 0.03 if torch.cuda.is_available() else 1e-2
"""Largest difference from the reference, with room (attention on a GPU rounds to TF32);
versions are units apart."""


@pytest.fixture(
    scope="module",
    params=["tied-bloom", pytest.param("two-ranks-each", marks=pytest.mark.slow)],
)
def case(request: pytest.FixtureRequest) -> tuple[str, int, dict[str, Any]]:
    return CASES[request.param]


@pytest.fixture(scope="module")
def paths(case: Any, checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {label: checkpoint(seed, **case[2]) for seed, label in enumerate("ab")}


@pytest.fixture(scope="module")
def seen(case: Any, paths: dict[str, Path]) -> dict[str, Any]:
    """One run of the script, for all tests of a case."""
    mode, tp_size, _ = case
    return run_script("stages", paths["a"], paths["b"], mode, tp_size)


def test_stages_commit_together_and_equal_a_fresh_engine(seen: dict[str, Any]) -> None:
    assert seen["whole"] == {"code": "committed"}
    assert seen["after commit"] == seen["expected"] != seen["before"]


def test_stages_roll_back_together(seen: dict[str, Any]) -> None:
    assert seen["after rollback"] == seen["before"]


def test_a_stage_has_its_own_layers_and_what_is_tied(
    seen: dict[str, Any], case: Any
) -> None:
    _, tp_size, shape = case
    ranks = [set(rank) for rank in seen["after commit"]["ranks"]]
    first, last = ranks[0], ranks[tp_size]
    assert ranks == [first] * tp_size + [last] * tp_size
    assert any(".0." in name for name in first - last)
    assert any(".1." in name for name in last - first)
    assert any("embed" in name for name in first & last) == shape.get("tied", False)


def test_every_tensor_is_read_back_from_the_stages_that_have_it(
    seen: dict[str, Any],
) -> None:
    assert seen["misread"] == []


def test_a_tensor_that_one_stage_rejects_changes_no_stage(seen: dict[str, Any]) -> None:
    refused = seen["refused"]
    names = refused.pop("names")
    for stage in ("first", "last"):
        for fault in (
            f"a tensor of the {stage} stage is missing",
            f"NaN for the {stage} stage",
        ):
            assert refused[fault]["code"] == "weights_mismatch"
            assert refused[fault]["tensors"] == [names[stage]]
        unequal = refused[f"the other stage did not get one of the {stage}"]
        assert "the ranks received different weights" in unequal["message"]
        assert refused[f"the {stage} stage breaks off"]["code"] == "engine_fault"
        (extra,) = refused[f"the {stage} stage is sent too much"]["tensors"]
        assert extra == names[stage].rsplit(".", 2)[0] + ".x"
    (unused,) = refused["what no stage uses is sent"]["tensors"]
    assert unused == names["first"].replace(".0.", ".7.")
    assert seen["after refusals"] == seen["before"]
    assert seen["label after refusals"] == "default"


def test_every_step_of_41_commits_under_load_is_of_one_version(
    seen: dict[str, Any], paths: dict[str, Path]
) -> None:
    every_step_is_of_one_version(seen["streams"], paths)
    assert seen["after many commits"] == seen["expected"]


def test_a_stage_that_changes_alone_is_found_by_the_test_above(
    seen: dict[str, Any], paths: dict[str, Path]
) -> None:
    reference = Reference(paths, torch.float32)
    torn = mismatches(as_outputs(seen["torn streams"]), reference, "b", NOISE)
    assert len(torn) > 10


def every_step_is_of_one_version(
    streams: list[dict[str, Any]], paths: dict[str, Path]
) -> None:
    """Raise unless commits came under load, and each token is of its version alone."""
    assert {len(stream["tokens"]) for stream in streams} == {100}
    spanning = sum(len(stream["spans"]) > 1 for stream in streams)
    assert spanning > len(streams) // 2, "the commits did not come under load"
    every_token_is_of_its_version(streams, paths)


def every_token_is_of_its_version(
    streams: list[dict[str, Any]], paths: dict[str, Path]
) -> None:
    """Raise, and tell all tokens that are not."""
    reference = Reference(paths, torch.float32)
    wrong = mismatches(as_outputs(streams), reference, "a", NOISE)
    assert not wrong, f"{len(wrong)} tokens:\n" + "\n".join(wrong)


def as_outputs(streams: list[dict[str, Any]]) -> list[Any]:
    """What the script told, in the form of vLLM's outputs."""
    return [
        SimpleNamespace(
            prompt_token_ids=stream["prompt"],
            outputs=[
                SimpleNamespace(
                    token_ids=stream["tokens"],
                    logprobs=[
                        {token: SimpleNamespace(logprob=logprob)}
                        for token, logprob in zip(
                            stream["tokens"], stream["logprobs"], strict=True
                        )
                    ],
                    weight_versions=[
                        SimpleNamespace(version=version, start=start, end=end)
                        for version, start, end in stream["spans"]
                    ],
                )
            ],
        )
        for stream in streams
    ]
