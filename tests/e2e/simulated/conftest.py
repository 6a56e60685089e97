"""Cores in this process whose worker is simulated; they start in a second."""

import logging
import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from tests.support.models.tiny import make_checkpoint
from tests.support.simulated.core import Loop, emptied, simulated_core
from tests.support.simulated.doors import Failing
from tests.support.simulated.dp_engines import (  # noqa: F401 (fixtures)
    both,
    engines,
    inflight,
    mixture,
)
from tests.support.simulated.worker import SimulatedExecutor


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model nobody runs: its configuration is read."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", 0)


@pytest.fixture(scope="package", autouse=True)
def silence() -> Iterator[None]:
    """Thousands of pauses would be thousands of lines."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def make(model: Path) -> Iterator[Callable[..., EngineCore]]:
    """`make(**options)`: a core with a simulated worker, and nothing in it."""
    cores: dict[str, EngineCore] = {}

    def core(executor: Any = SimulatedExecutor, **options: Any) -> EngineCore:
        key = repr((executor, options))
        if key not in cores:
            cores[key] = simulated_core(model, executor, **({"kind": Loop} | options))
        return emptied(cores[key])

    yield core
    for each in cores.values():
        each.shutdown()


@pytest.fixture
def core(make: Callable[..., EngineCore]) -> EngineCore:
    """A core with a loop, and two steps in flight."""
    return make(is_async=True)


@pytest.fixture
def cores(model: Path, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Two cores whose workers refuse what they are told to; `param` is their kind."""
    kind = getattr(request, "param", EngineCore)
    made = [simulated_core(model, Failing, kind=kind) for _ in range(2)]
    yield made
    for core in made:
        core.shutdown()
