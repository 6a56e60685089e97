"""Pauses and modes of commits with delta staging, on a GPU, with CUDA graphs."""

import pytest
import torch

from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.conftest import play, subject_of  # noqa: F401 (fixtures)
from tests.robustness.pauses.test_delta_staging import (  # noqa: F401 (tests and fixtures)
    live,
    subject,
    test_an_abort_that_races_with_a_flip_leaves_one_whole_version,
    test_decoding_goes_on_by_itself_when_the_lease_of_a_pause_runs_out,
    test_the_context_of_a_request_is_computed_anew_by_each_of_three_versions,
    test_updates_succeed_inside_pauses_of_another_owner,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("cell", cells.logged("cuda"), ids=str)
def test_every_token_is_of_the_weights_that_its_spans_name(
    play: rows.Play,  # noqa: F811
    cell: cells.Cell,
) -> None:
    play(cell)
