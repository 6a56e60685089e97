"""An engine for each model, number of ranks and transport; one lives at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import checkpoint  # noqa: F401
from tests.robustness.pauses.cells import Cell, backend_of
from tests.robustness.pauses.rows import Play
from tests.robustness.pauses.scene import Scene
from tests.robustness.pauses.subjects import Subject, begin


@pytest.fixture(scope="module")
def device() -> str:
    """Where engines of the module run; tests/gpu has others."""
    return "cpu"


@pytest.fixture(scope="module")
def subject_of(
    device: str,
    checkpoint: Callable[..., Path],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Subject]]:
    """`subject_of(model, ranks, backend)`: started, unless it is there already."""
    root = tmp_path_factory.mktemp("subjects")
    with ExitStack() as stack:
        there: dict[Any, Subject] = {}

        def of(model: str, ranks: int, backend: str) -> Subject:
            key = model, ranks, backend
            if key not in there:
                stack.close()
                there.clear()
                own = root / "-".join(map(str, key))
                own.mkdir(exist_ok=True)
                there[key] = begin(stack, *key, device, checkpoint, own)
            return there[key]

        yield of


@pytest.fixture
def play(
    subject_of: Callable[..., Subject],
    device: str,
    record_property: Callable[[str, object], None],
) -> Play:
    """`play(cell)` on its engine; a JUnit file has how long its pause took."""

    def on_its_engine(cell: Cell) -> None:
        subject = subject_of(cell.model, cell.ranks, backend_of(cell, device))
        Scene(subject, cell, record_property).play()

    return on_its_engine
