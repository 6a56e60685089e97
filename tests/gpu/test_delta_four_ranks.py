"""Deltas on four GPUs: KV heads that two ranks have each, and stages of two ranks."""

from typing import Any

import pytest
import torch

from tests.gpu.test_delta_ranks import (  # noqa: F401 (tests and fixtures)
    llm,
    sent,
    shape,
    start,
    test_a_chain_of_deltas_equals_whole_versions,
    test_a_flipped_bit_changes_nothing,
    test_a_lost_end_changes_nothing,
    test_a_version_without_a_change_is_a_version,
    test_after_another_trainers_version_the_whole_one_is_sent,
    test_one_tensor_of_a_fused_parameter_may_change_alone,
    weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"),
]

ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two KV heads on four": ({"hidden": 256}, {"tensor_parallel_size": 4}),
    "stages of two": ({"hidden": 256}, {"pipeline_parallel_size": 2}),
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]
