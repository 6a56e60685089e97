"""Adapters over updates on two GPUs: each rank has its part of their matrices."""

import pytest
import torch

from tests.e2e.test_adapters import (  # noqa: F401 (tests, run here on two ranks)
    adapter,
    engine,
    test_an_adapter_that_was_loaded_stays_loaded,
    test_an_adapters_kv_of_other_base_weights_is_never_read,
    test_an_update_equals_a_fresh_engine_with_and_without_an_adapter,
    test_kv_of_an_adapter_that_was_loaded_again_is_never_read,
    test_requests_of_an_adapter_live_through_a_commit,
)
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
