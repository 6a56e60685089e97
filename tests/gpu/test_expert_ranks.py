"""Experts on two GPUs: cut up as other layers, or shared out over the ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_experts import (  # noqa: F401 (of this module's models)
    SHAPE,
)
from tests.support.engines.probe import commits_and_rollbacks, greedy
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize("is_shared_out", [False, True])
def test_experts_of_two_ranks_equal_a_fresh_engine(
    start: Callable[..., Any],  # noqa: F811
    old: Path,
    new: Path,
    is_shared_out: bool,
) -> None:
    options = {"enable_expert_parallel": is_shared_out, "enforce_eager": False}
    fresh = greedy(start(new, **options))
    commits_and_rollbacks(start(old, **options), old, new, fresh)
