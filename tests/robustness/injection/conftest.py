"""The fixtures of tests/e2e, and an engine with faults in it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.e2e.conftest import (  # noqa: F401
    checkpoint,
    new,
    old,
    shape,
    start,
)
from tests.robustness.injection.cells import all_cells, killed_trainers, kills
from tests.robustness.injection.points import ENV, Trap, install, plugin
from tests.robustness.injection.subject import SHORT, Subject
from tests.support.engines.probe import prompts
from vllm.inflight import ops
from vllm.inflight.update import Manifest, TensorSpec


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trap]:
    """Where faults are armed, known to every process that is started meanwhile."""
    folder = tmp_path_factory.mktemp("injection")
    found = plugin(folder / "plugin")
    path = os.pathsep.join([found, os.environ["PYTHONPATH"]])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(ENV, str(folder))
        patched.setenv("PYTHONPATH", path)
        # Workers of an engine in this process are spawned with its own path.
        patched.syspath_prepend(found)
        # In this process all of it is undone with the module.
        yield Trap(folder, patched.setattr)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    """Of the engine of a module."""
    return {}


@pytest.fixture(scope="module")
def subject(
    trap: Trap,
    start: Callable[..., Any],  # noqa: F811
    old: Path,  # noqa: F811
    new: Path,  # noqa: F811
    options: dict[str, Any],
) -> Subject:
    """The module's engine, on the old weights."""
    install(trap.put)
    fresh = start(new, **options).generate(prompts(2), SHORT, use_tqdm=False)
    expected = [list(output.outputs[0].token_ids) for output in fresh]
    folders = {"old": old, "new": new}
    return Subject(start(old, **options), folders, expected, manifest_of(new), trap)


def manifest_of(folder: Path) -> dict[str, Any]:
    """Name, shape, dtype and digest of every tensor of a checkpoint."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Manifest.of(
        TensorSpec(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            ops.digest([tensor])[0].hex(),
        )
        for name, tensor in named.items()
    ).to_dict()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How much of the matrix this run has seen."""
    passed = terminalreporter.stats.get("passed", [])
    every = (*all_cells(), *kills(), *killed_trainers())
    cells = {str(cell) for cell in every}
    seen = {report.nodeid.partition("[")[2].rstrip("]") for report in passed}
    terminalreporter.write_line(
        f"fault injection: {len(seen & cells)} cells run / {len(cells)} in the matrix"
    )
