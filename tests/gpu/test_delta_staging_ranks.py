"""Delta staging on two GPUs: each rank has a log of its own, and all swap or none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_delta_staging import delta_engine, recovered_from_other_bits
from tests.e2e.test_deltas import (  # noqa: F401 (tests, run here on two GPUs)
    sent,
    test_a_chain_of_deltas_equals_whole_versions,
    test_a_flipped_bit_changes_nothing,
    test_a_lost_end_changes_nothing,
    test_a_version_without_a_change_is_a_version,
    test_after_another_trainers_version_the_whole_one_is_sent,
    test_one_tensor_of_a_fused_parameter_may_change_alone,
    weights,
)
from tests.support.deltas import stepped
from tests.support.engines.delta_ranks import written_before_swap
from tests.support.gpu.ranked import start  # noqa: F401 (a fixture)
from tests.support.models.families import gpu_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads of their own": ({"hidden": 256}, {}),
    "experts shared out": ({"family": "qwen3_moe"}, {"enable_expert_parallel": True}),
    "latent attention": ({"family": "deepseek_v2"}, gpu_options("deepseek_v2")),
}
"""Shapes of models, and options of engines."""


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def shape(engine: Any) -> dict[str, Any]:
    of_model: dict[str, Any] = engine[0]
    return of_model


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], old: Path, engine: Any) -> Any:  # noqa: F811 (the fixture)
    options = {
        "enforce_eager": False,
        "inflight": {"staging": "delta", "delta_gib": 0.2},
        "worker_extension_cls": "tests.support.engines.damaged_ranks.Damaged",
    }
    return delta_engine(start, old, **options, **engine[1])


def test_a_swap_that_meets_other_bits_on_one_rank_is_undone_on_both(
    llm: Any,
    old: Path,
    weights: dict[str, torch.Tensor],  # noqa: F811 (the fixture)
) -> None:
    llm.update_weights_from_disk(str(old), "old")
    recovered_from_other_bits(written_before_swap(llm, stepped(weights, 9)))
    assert llm.verify_weights()["result"] == "equal"
