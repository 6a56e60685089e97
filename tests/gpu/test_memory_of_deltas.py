"""Five hundred deltas leave nothing behind: memory of GPU and host, threads, files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_leaks import (  # noqa: F401 (one is a fixture)
    Record,
    deltas_leave_nothing,
    freezing_engines,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("staging", ["device", "delta"])
def test_memory_is_flat_over_500_deltas(
    start: Callable[..., Any],
    checkpoint: Callable[..., Path],
    staging: str,
    record_property: Record,
) -> None:
    folder = checkpoint(0, hidden=256)
    deltas_leave_nothing(start, folder, staging, record_property)
