"""Drafters beside quantised models, under CUDA graphs; needs one GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.drafted import either_or_both
from tests.support.models.tiny_drafters import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"family": "llama", "hidden": 1024}
KINDS = ("int8", "fp8-tensor", "fp8-block", "int4", "fp8_per_block")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_model_and_drafter_equal_fresh_engines_after_commits_and_rollbacks(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    tmp_path: Path,
    method: str,
    kind: str,
) -> None:
    either_or_both(
        start,
        (old, new),
        tmp_path,
        kind,
        method,
        enforce_eager=False,
        async_scheduling=False,  # no step begins before the drafts of the last one
    )
