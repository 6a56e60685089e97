"""Adapters over updates on two GPUs: each rank has its part of their matrices."""

import pytest
import torch

# In order: the last one ends the engine that the others share.
from tests.e2e.test_adapters import (  # noqa: F401 (tests, run here on two ranks)
    adapter,
    engine,
    test_an_adapter_that_was_loaded_stays_loaded,
    test_an_adapters_kv_of_other_base_weights_is_never_read,
    test_kv_of_an_adapter_that_was_loaded_again_is_never_read,
    test_requests_of_an_adapter_live_through_a_commit,
    test_updates_equal_fresh_engines_with_and_without_an_adapter,
)
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
