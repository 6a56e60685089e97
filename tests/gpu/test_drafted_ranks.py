"""Drafters on two GPUs: each rank has its part of them, eager."""

import pytest
import torch

from tests.e2e.test_drafted_ranks import (  # noqa: F401 (tests, run here on GPUs)
    seen,
    test_a_wrong_tensor_of_the_drafter_on_one_rank_changes_no_rank,
    test_model_and_drafter_equal_a_fresh_engines_on_both_ranks,
    test_the_drafter_alone_changes_on_both_ranks,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
