"""Mixture-of-experts models on a GPU: with CUDA graphs, and over two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_experts import (  # noqa: F401 (a test, run here on a GPU)
    SHAPE,
    test_an_expert_that_is_missing_is_named,
)
from tests.support.engines.probe import (
    commits_and_rollbacks,
    flips_under_load,
    greedy,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], new: Path) -> list[list[int]]:
    return greedy(start(new, enforce_eager=False))


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    return start(old, enforce_eager=False)


def test_experts_equal_a_fresh_engine_after_every_flip_and_rollback(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    llm.update_weights_from_disk(str(old), "old")
    commits_and_rollbacks(llm, old, new, fresh)


def test_experts_flip_under_load(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    flips_under_load(llm, (new, old), 20)
    llm.update_weights_from_disk(str(new), "last")
    assert greedy(llm) == fresh
    llm.update_weights_from_disk(str(old), "old")


def test_mixtral_equals_a_fresh_engine(
    start: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    old, new = (checkpoint(seed, family="mixtral") for seed in (0, 1))
    fresh = greedy(start(new, enforce_eager=False))
    commits_and_rollbacks(start(old, enforce_eager=False), old, new, fresh)
