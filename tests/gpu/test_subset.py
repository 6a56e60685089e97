"""Subsets on a GPU, where the rest is carried over by copies of pages' contents."""

import pytest
import torch

from tests.e2e.test_subset import (  # noqa: F401 (tests, run here on a GPU)
    engine,
    mixtures,
    replace,
    test_a_subset_after_a_failed_update_is_served_correctly,
    test_a_subset_after_a_rollback_is_served_correctly,
    test_a_subset_after_a_whole_update_keeps_the_other_tensors_of_that_update,
    test_a_subset_equals_a_fresh_engine_on_the_mixture,
    test_a_subset_is_rolled_back_as_any_version,
    test_a_whole_update_after_a_subset_is_whole,
    test_subsets_can_be_committed_while_requests_run,
    test_two_subsets_in_a_row_add_up,
    wholes,
)
from tests.e2e.test_subset_shapes import (  # noqa: F401 (likewise)
    test_tensors_outside_of_the_subset_stay_as_they_were_served,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
