"""Fixtures around real engines: checkpoints of the session, engines of a module.

Engines here run in this process (seconds to start). Those with processes of
their own are servers (tests/support/serving.py) or scripts run as subprocesses, because
vLLM freezes that choice once an engine exists.
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

import tests.support.engines.transport  # noqa: F401 (registers the transport "other")
from tests.support.deltas import stepped
from tests.support.engines import oracle
from tests.support.engines.bare_core import call, publish
from tests.support.engines.core_door import Door, said
from tests.support.engines.probe import greedy
from tests.support.engines.reference import Reference
from tests.support.engines.script import OPTIONS
from tests.support.models.quantised import quantise
from tests.support.models.tiny import make_checkpoint
from tests.support.shared_engines import ENDED

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True, scope="module")
def workers_without_extensions() -> Iterator[None]:
    """vLLM adds an extension to its own worker class, for good."""
    worker = type_of_workers()
    before = worker.__bases__
    yield
    worker.__bases__ = before


def type_of_workers() -> Any:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


MADE: dict[str, Path] = {}
"""Every checkpoint that this process has made."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(seed, kind, **shape)`: the folder of a tiny random model, made once.

    It is quantised as `kind` says, or bf16.
    """
    root = tmp_path_factory.mktemp("checkpoints")

    def make(seed: int, kind: str | None = None, **shape: Any) -> Path:
        plain = "-".join([str(seed), *(f"{k}={v}" for k, v in sorted(shape.items()))])
        key = plain if kind is None else f"{plain}-{kind}"
        if key not in MADE:
            MADE[key] = (
                make_checkpoint(root / key, seed, **shape)
                if kind is None
                else quantise(make(seed, **shape), root / key, kind)
            )
        return MADE[key]

    return make


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Any]]:
    """`start(folder, **options)`: an `LLM` in this process.

    It ends with the module, or when another one is started. A fixture that holds it is
    made anew for the next test that asks for it.
    """
    alive: list[Any] = []

    def llm(folder: Path, **options: Any) -> Any:
        from vllm import LLM

        stop(alive)
        alive.append(LLM(str(folder), **(OPTIONS | options)))
        return alive[-1]

    yield llm
    stop(alive)


@pytest.fixture(scope="module")
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The shape of the module's models: its `SHAPE`, or the smallest."""
    return getattr(request.module, "SHAPE", {})


@pytest.fixture(scope="module")
def old(checkpoint: Callable[..., Path], shape: dict[str, Any]) -> Path:
    """The weights that engines start with."""
    return checkpoint(0, **shape)


@pytest.fixture(scope="module")
def new(checkpoint: Callable[..., Path], shape: dict[str, Any]) -> Path:
    """The weights that they are updated to."""
    return checkpoint(1, **shape)


@pytest.fixture(scope="module")
def chain(
    request: pytest.FixtureRequest, old: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Checkpoints after `old`, each one step after the one before: `NUM_VERSIONS`."""
    weights, folders = load_file(old / "model.safetensors"), []
    for seed in range(request.module.NUM_VERSIONS):
        weights = stepped(weights, seed)
        folders.append(tmp_path_factory.mktemp(f"version-{seed}"))
        save_file(weights, folders[-1] / "model.safetensors")
    return folders


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], new: Path) -> list[list[int]]:
    """What an engine started on the new weights says."""
    return greedy(start(new))


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    """An engine on the old weights, with a transport of somebody else."""
    from vllm.config.weight_transfer import WeightTransferConfig

    return start(old, weight_transfer_config=WeightTransferConfig(backend="other"))


@pytest.fixture
def llm(engine: Any, old: Path) -> Iterator[Any]:
    """The engine, on the old weights, with no update under way."""
    engine.update_weights_from_disk(str(old), "old")
    yield engine
    if engine.weight_update_status()["active"] is not None:
        engine.abort_weight_update()
    oracle.check_served(engine, MADE.values())


@pytest.fixture(scope="module")
def folders(old: Path, new: Path) -> dict[str, Path]:
    """Both checkpoints by their labels."""
    return {"old": old, "new": new}


@pytest.fixture(scope="module")
def booted(folders: dict[str, Path]) -> Iterator[EngineCore]:
    """An engine core, and nothing in front of it."""
    options = OPTIONS | {"max_num_seqs": 4, "dtype": "float32"}
    config = EngineArgs(str(folders["old"]), **options).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    yield core
    core.shutdown()


@pytest.fixture
def core(booted: EngineCore, folders: dict[str, Path]) -> Iterator[EngineCore]:
    """The core on the old weights, without requests and without a pause."""
    publish(booted, folders["old"], "old")
    booted.reset_prefix_cache()
    yield booted
    call(booted, "resume")
    if call(booted, "status")["active"] is not None:
        call(booted, "abort")
    booted.abort_requests(list(booted.scheduler.requests))
    while booted.scheduler.has_requests():
        booted.step_fn()


@pytest.fixture(scope="module")
def expected(booted: EngineCore, folders: dict[str, Path]) -> dict[str, Any]:
    """What the new weights say, when they come the plain way."""
    publish(booted, folders["new"], "expected")
    return said(booted)


@pytest.fixture
def door(core: EngineCore) -> Door:
    """The routes of a server, in front of the core."""
    return Door(core)


@pytest.fixture(scope="module")
def versions(checkpoint: Callable[..., Path]) -> dict[str, Path]:
    """Three checkpoints by their labels."""
    return {label: checkpoint(seed) for seed, label in enumerate("abc")}


@pytest.fixture(scope="module")
def reference(versions: dict[str, Path]) -> Reference:
    """The same three, computed by transformers."""
    return Reference(versions, torch.float32)


def is_alive(llm: Any) -> bool:
    """Whether an engine can still be asked what it serves."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    controller = getattr(core, "vllm_inflight", None)
    return controller is not None and controller.ranks.reason is None


def stop(alive: list[Any]) -> None:
    """End the engines in `alive`: one at a time fits a process."""
    while alive:
        llm = alive.pop()
        try:
            if is_alive(llm):
                oracle.check_served(llm, MADE.values())
        finally:  # what one serves fails one test, not all that start another
            llm.llm_engine.engine_core.shutdown()
            ENDED.add(llm)
        del llm
        gc.collect()
        if torch.cuda.is_available():  # what it had is not the next one's
            torch.cuda.empty_cache()
    # One that was refused as it started has left its groups: a mixture has one more.
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
