"""Drafters beside quantised models: either changes alone, or both at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.drafted import either_or_both
from tests.quantised import quantise
from tests.tiny_drafters import METHODS, drafting, make_drafter

pytestmark = pytest.mark.engine

SHAPE = {"family": "llama"}
QUICK = ("int8", "eagle3")
ONLINE = "fp8_per_channel"
"""Not of a checkpoint: bf16 that is quantised at every update."""
KINDS = ("int8", "fp8-channel", "int4", ONLINE)


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
    folders = {"old": old, "new": new}
    if kind != ONLINE:
        folders = {n: quantise(p, tmp_path / n, kind) for n, p in folders.items()}
    drafters = {
        name: make_drafter(tmp_path / f"drafter-{name}", seed, old, method)
        for seed, name in enumerate(folders, start=5)
    }

    def begin(model: Path, drafter: Path) -> Any:
        online = {"quantization": kind} if kind == ONLINE else {}
        return start(model, speculative_config=drafting(method, drafter), **online)

    either_or_both(begin, folders, drafters)
