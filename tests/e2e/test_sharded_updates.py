"""Updates that a tensor-parallel trainer sends in the slices of its ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config.weight_transfer import WeightTransferConfig

from tests.support.engines.mixtures import said
from tests.support.engines.script import run_script
from tests.support.engines.sliced import MISSING
from tests.support.engines.sync_client import gloo_trainer
from tests.support.models.sliced_source import SlicedSource

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., Path]) -> dict[str, Any]:
    """One run of the script, for all tests of this module."""
    return run_script("sliced", checkpoint(0), checkpoint(1))


@pytest.mark.parametrize("turn", ["two ranks", "two ranks again", "three slices"])
def test_slices_make_what_a_fresh_engine_serves(
    seen: dict[str, Any], turn: str
) -> None:
    expected, before = seen["expected"], seen["before"]
    assert seen[turn][:2] == expected[:2]
    assert expected[0] != before[0] and expected[1] != before[1]
    assert seen[f"after {turn}"] == before


@pytest.mark.parametrize("who", ["trainer", "engine"])
def test_a_missing_slice_is_rejected_by_name_and_the_old_version_served(
    seen: dict[str, Any], who: str
) -> None:
    error = seen[f"{who} refuses"]
    assert error["code"] == "weights_mismatch" and error["tensors"] == [MISSING]
    assert "no slice has [0, 128) of dim 1" in error["message"]
    assert seen["after refusals"] == seen["before"]


def test_a_slice_for_a_missing_rank_is_rejected_by_name(
    seen: dict[str, Any],
) -> None:
    error = seen["unknown rank"]
    assert error["code"] == "weights_mismatch" and len(error["tensors"]) == 1
    assert "is of rank 2, this engine has 2" in error["message"]
    assert seen["after refusals"] == seen["before"]


def test_no_rank_commits_if_ranks_hold_different_values_of_one_slice(
    seen: dict[str, Any],
) -> None:
    assert seen["ranks that differ"]["code"] == "weights_mismatch"
    assert seen["after ranks that differ"] == seen["before"]


def test_a_quantised_layer_gets_the_slices_that_it_holds_until_it_is_complete(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    online = {"quantization": "fp8_per_channel"}
    old, new = checkpoint(0), checkpoint(1)
    fresh = said(start(new, **online))
    backend = WeightTransferConfig(backend="inflight_gloo")
    llm = start(old, weight_transfer_config=backend, **online)
    before = said(llm)
    # A bucket is less than a row of slices: every tensor is put together in scratch
    # memory, which is not used again as long as a layer looks into it.
    source = SlicedSource(new, 3, are_told=False)
    trainer = gloo_trainer(llm, source, bucket_bytes=1 << 12)
    for _ in range(2):
        trainer.send_weights()
        assert said(llm) == fresh
        llm.rollback_weights()
        assert said(llm) == before
    trainer.shutdown()
