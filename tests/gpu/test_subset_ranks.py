"""Subsets on two GPUs: each rank carries over the rest of what it serves."""

import pytest
import torch

from tests.e2e.test_subset import (  # noqa: F401 (tests, run here on two ranks)
    engine,
    mixtures,
    replace,
    test_a_subset_after_a_failed_update_is_served_correctly,
    test_a_subset_after_a_whole_update_keeps_the_other_tensors_of_that_update,
    test_a_subset_equals_a_fresh_engine_on_the_mixture,
    test_a_subset_is_rolled_back_as_any_version,
    test_a_whole_update_after_a_subset_is_whole,
    test_subsets_can_be_committed_while_requests_run,
    test_two_subsets_in_a_row_add_up,
    wholes,
)
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
