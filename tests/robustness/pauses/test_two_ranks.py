"""The cells of two tensor-parallel ranks, on a CPU; tests/gpu has those on GPUs."""

import pytest

from tests.robustness.pauses import cells, rows

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("cell", rows.params("cpu", *rows.MODELS, ranks=2))
def test_every_token_is_of_the_weights_that_its_spans_name(
    play: rows.Play, cell: cells.Cell
) -> None:
    play(cell)
