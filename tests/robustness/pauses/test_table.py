"""The table is what it says: every pair that can be, and why the others cannot."""

from itertools import product

import pytest

from tests.robustness.pauses.cells import (
    CHANGES,
    MODES,
    WHEN,
    WORKLOADS,
    Cell,
    all_cells,
    cover,
    impossible,
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_pair_of_facts_occurs_in_a_chosen_cell(device: str) -> None:
    def pairs(cells: list[Cell]) -> set[object]:
        return set().union(*(cell.pairs for cell in cells))

    chosen = list(cover(device))
    assert pairs(chosen) == pairs(all_cells(device))
    assert 40 <= len(chosen) == len(set(chosen)) <= 60


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_cell_is_possible_or_has_a_reason_why_not(device: str) -> None:
    facts = product(MODES, WHEN, (False, True), CHANGES, (1, 2), WORKLOADS)
    every = {Cell(*each) for each in facts}
    can_be = set(all_cells(device))
    assert all(impossible(cell, device) for cell in every - can_be)
    assert not any(impossible(cell, device) for cell in can_be)
