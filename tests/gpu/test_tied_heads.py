"""Tied heads that a checkpoint has all the same, on a GPU."""

import pytest
import torch

from tests.e2e.test_tied_heads import (  # noqa: F401 (tests, run here on a GPU)
    test_a_head_that_was_a_copy_of_the_embedding_may_be_left_out,
    test_a_tied_head_that_is_not_the_embedding_is_rejected,
    test_checkpoints_with_a_tied_head_equal_a_fresh_engine,
    test_deltas_change_a_tied_head_with_its_embedding,
    tied,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
