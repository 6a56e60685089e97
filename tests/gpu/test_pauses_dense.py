"""The pause cells of a dense model, on a GPU, with CUDA graphs."""

import pytest
import torch

from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.conftest import play, subject_of  # noqa: F401 (fixtures)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("cell", rows.params("cuda", cells.DENSE))
def test_every_token_is_of_the_weights_that_its_spans_name(
    play: rows.Play,  # noqa: F811
    cell: cells.Cell,
) -> None:
    play(cell)
