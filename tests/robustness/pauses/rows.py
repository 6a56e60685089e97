"""The cells of a module, as parameters of its test."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.robustness.pauses import cells
from tests.robustness.pauses.cells import Cell, backend_of

Play = Callable[[Cell], None]
"""Of the fixture that plays one cell on its engine."""

MODELS = (*(cells.DENSE, cells.ADAPTER, cells.DRAFTED, cells.EXPERTS, cells.QUANTISED),)
QUICK = (cells.DENSE,)
"""Models whose cells every run of the tests runs, on one rank and a CPU, over the
transport that most cells have."""


def params(device: str, *models: str, ranks: int = 1) -> list[Any]:
    """The cells of some models."""
    chosen = cells.of(device, models, ranks)
    return [pytest.param(c, id=str(c), marks=_marks(c, device)) for c in chosen]


def _marks(cell: Cell, device: str) -> Any:
    backend = backend_of(cell, device)
    if device == "cuda":
        wants_two = backend in cells.WANTS_OWN_GPU
        return NEEDS_TWO if wants_two else ()
    usual = backend == cells.BACKENDS["cpu"][cells.COLLECTIVE]
    is_quick = usual and cell.ranks == 1 and cell.model in QUICK
    return () if is_quick else pytest.mark.slow


NEEDS_TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for the trainer"
)
