"""Subsets on a GPU, where the rest is carried over by copies of pages' contents."""

import pytest
import torch

from tests.e2e.test_subset import (  # noqa: F401 (tests, run here on a GPU)
    engine,
    mixtures,
    replace,
    test_a_subset_after_a_rollback,
    test_a_subset_after_a_whole_update_keeps_the_rest_of_that,
    test_a_subset_after_an_update_that_failed,
    test_a_subset_equals_a_fresh_engine_on_the_mixture,
    test_a_subset_is_rolled_back_as_any_version,
    test_a_whole_update_after_a_subset_is_whole,
    test_subsets_while_requests_run,
    test_two_subsets_in_a_row_add_up,
    wholes,
)
from tests.e2e.test_subset_shapes import (  # noqa: F401 (likewise)
    test_the_rest_is_what_was_served,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
