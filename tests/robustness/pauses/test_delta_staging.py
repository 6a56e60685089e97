"""Pauses and modes of commits with delta staging; tests/gpu runs such cells, too.

The commit is a swap there, and a rollback the same swap. The requests and all checks
are those of the other cells.
"""

from typing import Any

import pytest

from tests.robustness.pauses import cells, rows
from tests.robustness.pauses.subjects import Subject
from tests.robustness.pauses.test_oracle import DEVICES
from tests.robustness.pauses.test_uses import (  # noqa: F401 (a fixture, and tests)
    live,
    test_an_abort_that_races_with_a_flip_leaves_one_whole_version,
    test_decoding_goes_on_by_itself_when_the_lease_of_a_pause_runs_out,
    test_the_context_of_a_request_is_computed_anew_by_each_of_three_versions,
    test_updates_succeed_inside_pauses_of_another_owner,
)
from vllm.inflight.calls import ReadStaging

pytestmark = pytest.mark.engine

QUICK = {
    ("in_place", cells.PAUSE, cells.FILES),
    ("retract", cells.COMMIT, cells.COLLECTIVE),
    ("abort", cells.PAUSE, cells.ROLLBACK),
    ("in_place", cells.COMMIT, cells.ROLLBACK),
}
"""Cells that every run of the tests runs."""


@pytest.fixture(scope="module")
def subject(subject_of: Any, device: str) -> Subject:
    found: Subject = subject_of(cells.LOGGED, 1, DEVICES[device])
    (told,) = found.live.control("ask", ReadStaging())
    assert told["has_logs"], told
    return found


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell,
            id=str(cell),
            marks=()
            if (cell.mode, cell.when, cell.change) in QUICK
            else pytest.mark.slow,
        )
        for cell in cells.logged("cpu")
    ],
)
def test_every_token_is_of_the_weights_that_its_spans_name(
    play: rows.Play, cell: cells.Cell
) -> None:
    play(cell)
