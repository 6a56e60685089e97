"""The matrix is what it says: all that can be, and why the others cannot."""

from itertools import product

from tests.injection.cells import (
    CODE,
    DATA,
    ENGINES,
    PLACES,
    POINTS,
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
    cells = [cell for cell in all_cells() if cell.place not in ENGINES]
    runs = set().union(*(cell.pairs for cell in quick()))
    assert runs == set().union(*(cell.pairs for cell in cells))
    assert len(quick()) < len(all_cells()) / 2
