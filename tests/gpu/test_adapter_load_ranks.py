"""Adapters replaced on two GPUs: on all ranks, or on none."""

import pytest
import torch

from tests.e2e.test_adapter_loads import (  # noqa: F401 (tests, run here on two)
    adapter,
    engine,
    test_a_failed_load_leaves_the_adapter_unchanged,
    test_a_new_adapter_that_does_not_fit_is_loaded_on_no_rank,
    test_an_adapter_is_replaced_and_replaced_again,
    test_requests_go_on_with_the_new_weights,
)
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
