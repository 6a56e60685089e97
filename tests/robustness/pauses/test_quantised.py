"""The cells of a quantised model, on a CPU; tests/gpu runs such cells on GPUs."""

import pytest

from tests.robustness.pauses import cells, rows

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("cell", rows.params("cpu", cells.QUANTISED))
def test_every_token_is_of_the_weights_that_its_spans_name(
    play: rows.Play, cell: cells.Cell
) -> None:
    play(cell)
