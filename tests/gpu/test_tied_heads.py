"""Tied heads that a checkpoint has all the same, on a GPU."""

import pytest
import torch

from tests.e2e.test_tied_heads import (  # noqa: F401 (tests, run here on a GPU)
    test_a_tied_head_that_is_not_the_embedding_is_refused,
    test_where_the_head_was_a_copy_it_need_not_come,
    test_with_heads_in_the_checkpoints_all_equals_a_fresh_engine,
    tied,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
