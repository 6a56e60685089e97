"""The pause cells of a dense model, on a GPU, with CUDA graphs."""

from typing import Any

import pytest
import torch

from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.conftest import subject_of  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("cell", rows.params("cuda", cells.DENSE))
def test_every_token_is_of_the_weights_that_its_spans_name(
    subject_of: Any,  # noqa: F811
    cell: cells.Cell,
) -> None:
    rows.play(subject_of, "cuda", cell)
