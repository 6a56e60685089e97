"""Deltas on two GPUs: each rank writes its part, and all of them prove the whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig

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
from tests.support.gpu.ranked import STAGES, start  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads of their own": ({"hidden": 256}, {}),
    "one KV head on both": ({}, {}),
    "stages": ({}, STAGES),
    "stages, tied": ({"tied": True}, STAGES),
    "experts shared out": ({"family": "qwen3_moe"}, {"enable_expert_parallel": True}),
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
    transfer = WeightTransferConfig(backend="local")
    return start(old, weight_transfer_config=transfer, enforce_eager=False, **engine[1])
