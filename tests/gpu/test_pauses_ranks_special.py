"""The pause cells of experts and of a quantised model on two GPUs, with CUDA graphs."""

from typing import Any

import pytest
import torch

from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.conftest import subject_of  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.parametrize(
    "cell", rows.params("cuda", cells.EXPERTS, cells.QUANTISED, ranks=2)
)
def test_every_token_is_of_the_weights_that_its_spans_name(
    subject_of: Any,  # noqa: F811
    cell: cells.Cell,
) -> None:
    rows.play(subject_of, "cuda", cell)
