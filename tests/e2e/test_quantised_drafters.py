"""Drafters beside quantised models: either changes alone, or both at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.drafted import either_or_both
from tests.support.models.tiny_drafters import METHODS

pytestmark = pytest.mark.engine

SHAPE = {"family": "llama"}
KINDS = ("int8", "fp8-channel", "int4", "fp8_per_channel")
QUICK = ("int8", "eagle3")


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(
            kind, method, marks=() if (kind, method) == QUICK else pytest.mark.slow
        )
        for kind in KINDS
        for method in METHODS
    ],
)
def test_model_and_drafter_equal_fresh_engines_after_commits_and_rollbacks(
    start: Callable[..., Any],
    old: Path,
    new: Path,
    tmp_path: Path,
    kind: str,
    method: str,
) -> None:
    if kind == "int4" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's int4 kernel wants AVX-512")
    either_or_both(start, (old, new), tmp_path, kind, method)
