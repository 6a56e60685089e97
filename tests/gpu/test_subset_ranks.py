"""Subsets on two GPUs: each rank carries over the rest of what it serves."""

import pytest
import torch

from tests.e2e.test_subset import (  # noqa: F401 (tests, run here on two ranks)
    engine,
    mixtures,
    replace,
    test_a_subset_after_a_whole_update_keeps_the_rest_of_that,
    test_a_subset_after_an_update_that_failed,
    test_a_subset_equals_a_fresh_engine_on_the_mixture,
    test_a_subset_is_rolled_back_as_any_version,
    test_a_whole_update_after_a_subset_is_whole,
    test_subsets_while_requests_run,
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
