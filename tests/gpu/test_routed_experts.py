"""The experts of each token beside its version, on a GPU."""

import pytest
import torch

from tests.e2e.test_routed_experts import (  # noqa: F401 (tests, run here on a GPU)
    SHAPE,
    routed,
    routing,
    test_a_cached_prefix_has_the_experts_of_its_own_version,
    test_the_experts_of_each_token_are_those_of_the_version_that_read_it_first,
    test_the_rollout_route_returns_them_as_sglang_does,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
