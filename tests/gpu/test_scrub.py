"""What a GPU serves is compared with the digest of its label."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_scrub import (  # noqa: F401 (tests, run here on a GPU)
    engine,
    folders,
    llm,
    test_a_subset_is_compared_with_all_of_the_version_that_it_made,
    test_every_commit_is_read_back_where_that_was_asked_for,
    test_every_tensor_is_compared_with_what_was_announced,
    test_one_bit_that_changes_is_named,
    test_tokens_flow_while_it_is_read_and_a_commit_begins_it_anew,
    test_what_is_scrubbed_regularly_alarms,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_the_first_version_that_is_replayed_is_read_back_unasked(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    fresh = start(checkpoint(0))
    fresh.update_weights_from_disk(str(checkpoint(1)), "recorded")
    assert fresh.weight_info()["scrub"] is None
    fresh.update_weights_from_disk(str(checkpoint(0)), "replayed")
    while (found := fresh.weight_info()["scrub"]) is None:
        pass
    assert found["result"] == "equal"
    assert (found["num_tensors"], found["num_parameters"]) == (25, 0)
