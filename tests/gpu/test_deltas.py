"""Deltas on a GPU, under CUDA graphs: only what changes is read and written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig

from tests.e2e.test_deltas import (  # noqa: F401 (tests, run here on a GPU)
    sent,
    test_a_chain_of_deltas_equals_whole_versions,
    test_a_delta_from_another_version_is_rejected_at_once,
    test_a_delta_is_committed_while_requests_run,
    test_a_flipped_bit_changes_nothing,
    test_a_lost_end_changes_nothing,
    test_a_lost_part_changes_nothing,
    test_a_scrub_after_deltas_names_the_tensor_with_a_changed_bit,
    test_a_trainer_in_float32_sends_what_changes_of_what_is_served,
    test_a_version_is_kept_and_searched_where_the_weights_are,
    test_a_version_without_a_change_is_a_version,
    test_after_another_trainers_version_the_whole_one_is_sent,
    test_one_tensor_of_a_fused_parameter_may_change_alone,
    test_parts_that_come_together_lead_to_the_same_version,
    test_small_deltas_keep_the_namespace_of_kv_and_a_large_one_begins_another,
    test_when_most_has_changed_the_whole_version_is_sent,
    weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], old: Path) -> Any:
    transfer = WeightTransferConfig(backend="local")
    return start(old, weight_transfer_config=transfer, enforce_eager=False)
