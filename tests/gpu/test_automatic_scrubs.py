"""Engines that scrub their live weights by themselves, each started anew."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_scrub import (  # noqa: F401 (tests, run here on a GPU)
    folders,
    test_a_regular_scrub_reports_weights_that_have_changed,
    test_every_commit_is_read_back_where_that_was_asked_for,
)
from tests.support.engines.oracle import differing
from vllm.inflight.errors import StagingUnavailable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_the_first_version_that_is_replayed_is_read_back_unasked(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    fresh = start(checkpoint(0))
    assert fresh.weight_info()["scrub"] is None
    fresh.update_weights_from_disk(str(checkpoint(1)), "replayed")
    until = time.monotonic() + 60
    while (found := fresh.weight_info()["scrub"]) is None:
        assert time.monotonic() < until
    assert found["result"] == "equal"
    assert (found["num_tensors"], found["num_parameters"]) == (25, 0)


def test_an_engine_that_was_shut_down_touches_no_weights_of_the_next(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    """Its addresses may be the next one's, as both are of one process."""
    ended = start(checkpoint(0))
    following = start(checkpoint(1))
    for _ in range(2):
        with pytest.raises(StagingUnavailable, match="shut down"):
            ended.update_weights_from_disk(str(checkpoint(0)), "late")
    with pytest.raises(StagingUnavailable, match="shut down"):
        ended.verify_weights()
    torch.cuda.synchronize()
    assert differing(following, checkpoint(1)) == []
