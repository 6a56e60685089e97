"""What holds for every test."""

import getpass
import os
import shutil
import sys
import tempfile
import time
from importlib import import_module
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests.support.calm.sitecustomize  # noqa: F401 (in this process; its children by path)
from tests.support.calm.engine_starts import (
    collect_once_per_engine,
    freeze_imports,
    inspect_models_here,
    leave_helpers_uncompiled,
    multiply_fp8_by_torch,
    override_kernels_once,
)
from tests.support.shared_engines import renew, require_one
from tests.support.shared_memory import sweep

BEGAN = time.time()
TOLD = 3000
"""Characters of a failure that are shown when it happens."""

ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        str(ROOT / "tests" / "support" / "calm"),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
).rstrip(os.pathsep)

# One core decodes, the other is free for what stages: the models are tiny. Tests that
# run side by side decode on different ones, and nobody waits for threads to meet. A
# process with threads of OpenMP could not be forked.
LANE = os.environ.get("PYTEST_XDIST_WORKER", "")
CORES = sorted(os.sched_getaffinity(0))
CORE = CORES[int(LANE.removeprefix("gw") or 0) % len(CORES)]
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(CORE)
os.environ["OMP_NUM_THREADS"] = "1"
# By itself numba, which drafts are looked up with, has torch's threads be as many as
# cores, on a core that they have together.
os.environ["NUMBA_NUM_THREADS"] = "1"

# A busy machine is no reason to fail.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Give all lanes, and what they start, one folder for temporary files.

    An engine of vLLM leaves files behind there, and its sockets if it is killed.
    """
    if LANE:
        return
    usual = tempfile.gettempdir()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)  # pytest keeps three runs
    compiled = Path(usual) / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    # Short, as the path of a socket has at most 107 bytes
    folder = tempfile.mkdtemp(prefix="tests-")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    # After multiprocessing has removed its own folder there, which has priority -100
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out the tests of what the installed release of vLLM does not have."""
    from vllm.inflight.releases.table import holds, installed

    def is_meant(item: pytest.Item) -> bool:
        since, before = (
            item.get_closest_marker("since"),
            item.get_closest_marker("before"),
        )
        lacking = item.get_closest_marker("lacking")
        if lacking is not None and installed() in lacking.args:
            return False
        return holds(
            None if since is None else since.args[0],
            None if before is None else before.args[0],
        )

    others = [item for item in items if not is_meant(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if is_meant(item)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start an engine anew that tests share and that a test before has ended."""
    renew(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the engines of this process share what each would do anew."""
    require_one(session.items)
    if any(item.get_closest_marker("engine") for item in session.items):
        from tests.support.preloaded_process import OF_ENGINES, preload_spawned

        for name in OF_ENGINES:  # most engines would import them later
            import_module(name)
        preload_spawned()
    freeze_imports()
    collect_once_per_engine()
    override_kernels_once()
    inspect_models_here()
    leave_helpers_uncompiled()
    multiply_fp8_by_torch()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell at once what failed: a run that is ended before its time has no summary."""
    if report.failed and not LANE:
        told = report.longreprtext[-TOLD:]
        print(f"\n{report.nodeid}, {report.when}:\n{told}", file=sys.stderr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """After all lanes: what vLLM's processes left in memory when they were killed."""
    if not LANE:
        sweep(BEGAN)
