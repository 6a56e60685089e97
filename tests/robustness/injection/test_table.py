"""The matrix is what it says: all that can be, and why the others cannot."""

from collections.abc import Iterable
from itertools import product

from tests.robustness.injection.cells import (
    CHEAP,
    CODE,
    DATA,
    PLACES,
    POINTS,
    TWO_RANKS,
    Cell,
    all_cells,
    impossible,
    quick,
)


def test_every_cell_is_run_or_has_a_reason_why_it_cannot_be() -> None:
    every = {Cell(*facts) for facts in product(POINTS, CODE + DATA, PLACES)}
    runs = set(all_cells())
    assert all(impossible(cell) for cell in every - runs)
    assert not any(impossible(cell) for cell in runs)


def test_every_pair_of_point_fault_and_place_occurs_in_every_run() -> None:
    def pairs(cells: Iterable[Cell]) -> set[tuple[str, str]]:
        places = CHEAP + TWO_RANKS
        return set().union(*(cell.pairs for cell in cells if cell.place in places))

    assert pairs(quick()) == pairs(all_cells())
    assert len(quick()) < len(all_cells()) / 2
