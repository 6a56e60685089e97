"""Families on two GPUs: one for each way in which loaders cut up what they get."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import gpu_options
from tests.gpu.ranked import start  # noqa: F401 (a fixture)
from tests.gpu.test_families import equals_a_fresh_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CUT_UP = (
    "deepseek_v3",
    "falcon_h1",
    "gemma3",
    "glm4_moe_lite",
    "gpt2",
    "granite_moe_hybrid",
    "jamba",
    "lfm2_moe",
    "llama4",
    "mamba2",
    "nemotron_h",
    "nemotron_h_moe",
    "phi3",
    "qwen2",
    "qwen3_5_moe",
    "qwen3_next",
)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", CUT_UP)
def test_a_family_on_two_ranks_equals_a_fresh_engine(
    start: Callable[..., Any],  # noqa: F811
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    family: str,
    eager: bool,
) -> None:
    options = {"enforce_eager": eager} | gpu_options(family)
    equals_a_fresh_engine(partial(start, **options), checkpoint, tmp_path, family, 4)
