"""W1 to W21: how vLLM as it is fails around an update, and what the same calls do here.

Each sequence of calls is played twice: on vLLM as it is, where the failure has to show
(`make test-upstream-faults`; where it does not, upstream has mended it, and the row has
to go), and here, where it must not.
"""

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.robustness.faults.results import ARMS, ROOT, ROWS, facts, read, record
from tests.robustness.faults.row import Row, Seen

ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
)


def marks(row: type[Row]) -> Any:
    if row.needs_gpu:
        return ON_A_GPU
    return pytest.mark.slow if row.takes_minutes else ()


PLAYED = [
    pytest.param(row, id=name, marks=ON_A_GPU if row.needs_gpu else ())
    for name, row in ROWS.items()
    if row.play
]
PLAYED_HERE = [
    pytest.param(row, id=name, marks=marks(row))
    for name, row in ROWS.items()
    if row.play and not row.instead
]


@pytest.mark.engine
@pytest.mark.upstream
@pytest.mark.parametrize("row", PLAYED)
def test_unpatched_vllm_shows_the_fault(
    row: type[Row], upstream: Callable[[str], Seen]
) -> None:
    assert row.play is not None
    record(row, "upstream", row.upstream(upstream(row.play)))


@pytest.mark.engine
@pytest.mark.parametrize("row", PLAYED_HERE)
def test_the_same_calls_do_not_show_the_fault_here(
    row: type[Row], here: Callable[[str], Seen]
) -> None:
    assert row.play is not None
    record(row, "here", row.here(here(row.play)))


def test_there_is_a_row_for_each_of_the_faults() -> None:
    assert list(ROWS) == [f"W{number}" for number in range(1, 22)]


def test_the_results_file_matches_the_rows() -> None:
    kept = read()
    assert list(kept) == list(ROWS)
    for name, row in ROWS.items():
        assert set(kept[name]) <= {"fault", "tests", *ARMS}
        assert kept[name] == kept[name] | facts(row)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_tests_that_a_row_names_exist(row: type[Row]) -> None:
    for name in row.tests:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
