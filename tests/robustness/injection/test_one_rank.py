"""Every fault that an engine of one rank survives, in one engine, one after another."""

import pytest

from tests.robustness.injection.cells import CHEAP, Cell, params
from tests.robustness.injection.subject import Subject

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("cell", params(*CHEAP))
def test_a_whole_version_is_served_and_the_next_update_works(
    subject: Subject, cell: Cell
) -> None:
    subject.survives(cell)
