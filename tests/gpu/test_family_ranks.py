"""Families on two GPUs: one for each way in which loaders cut up what they get."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.mixtures import equals_fresh_engines
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)
from tests.support.models.families import CUT_UP, gpu_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


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
    folders = (checkpoint(0, family=family), checkpoint(1, family=family))
    equals_fresh_engines(partial(start, **options), folders, family, tmp_path, rounds=4)
