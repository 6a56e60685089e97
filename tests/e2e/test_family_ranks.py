"""Families on two ranks: one for each way in which loaders cut up what they get."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines.script import run_script
from tests.support.models.families import CUT_UP, WANT_TORCHVISION, WITHOUT_KERNELS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ON_CPU = [n for n in CUT_UP if n not in WITHOUT_KERNELS + WANT_TORCHVISION]


@pytest.mark.parametrize("family", ON_CPU)
def test_a_family_on_two_ranks_equals_fresh_engines(
    checkpoint: Callable[..., Path], family: str
) -> None:
    folders = (checkpoint(seed, family=family) for seed in (0, 1))
    assert run_script("family_ranks", family, *folders) == {"equal": True}
