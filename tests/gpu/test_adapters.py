"""Adapters over updates on a GPU: their stacks lie outside the pages that change."""

import pytest
import torch

# In order: the last one ends the engine that the others share.
from tests.e2e.test_adapters import (  # noqa: F401 (tests, run here on a GPU)
    adapter,
    engine,
    test_adapters_stay_loaded_when_upstream_reloads_the_base_weights,
    test_an_adapter_that_was_loaded_stays_loaded,
    test_an_adapters_kv_of_other_base_weights_is_never_read,
    test_kv_of_an_adapter_that_was_loaded_again_is_never_read,
    test_requests_of_an_adapter_live_through_a_commit,
    test_updates_equal_fresh_engines_with_and_without_an_adapter,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
