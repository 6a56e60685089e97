"""The pause cells of a dense model, adapters and a drafter, on two GPUs."""

import pytest
import torch

from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.conftest import play, subject_of  # noqa: F401 (fixtures)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    "cell", rows.params("cuda", cells.DENSE, cells.ADAPTER, cells.DRAFTED, ranks=2)
)
def test_every_token_is_of_the_weights_that_its_spans_name(
    play: rows.Play,  # noqa: F811
    cell: cells.Cell,
) -> None:
    play(cell)
