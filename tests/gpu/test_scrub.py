"""What a GPU serves is compared with the digest of its label."""

import pytest
import torch

from tests.e2e.test_scrub import (  # noqa: F401 (tests, run here on a GPU)
    engine,
    folders,
    llm,
    test_a_scrub_names_the_tensors_with_a_changed_bit,
    test_a_subset_is_compared_with_all_of_the_version_that_it_made,
    test_every_tensor_is_compared_with_what_was_announced,
    test_tokens_flow_during_a_scrub_and_a_commit_restarts_the_scrub,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
