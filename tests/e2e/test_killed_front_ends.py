"""A front end that is killed while its engine starts leaves no process behind.

A plugin lets every worker wait inside its load of the model, as one that waits for a
rank that never comes. The front end is killed meanwhile.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.preloaded_process import begin
from tests.support.serving import START_S, Server
from tests.support.waiting import until

pytestmark = pytest.mark.engine

WAITING_PLUGIN = """
import functools, os, pathlib, time

def register():
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model

    @functools.wraps(load)
    def load_model(self, *args, **kwargs):
        pathlib.Path(os.environ["LOADING"], str(os.getpid())).touch()
        time.sleep(600)

    Worker.load_model = load_model
"""

LLM = """if True:
    import sys
    from vllm import LLM
    from tests.support.engines.script import OPTIONS

    if __name__ == "__main__":
        LLM(sys.argv[1], **OPTIONS)
"""

GONE_S = 60
"""Much less than the workers wait. A process looks every second and ends within 5 more,
then those that it started; beside other tests all of it takes longer."""


@pytest.fixture
def loading(tmp_path: Path) -> Path:
    """A folder where each worker that loads leaves a file."""
    folder = tmp_path / "loading"
    folder.mkdir()
    return folder


@pytest.fixture
def env(tmp_path: Path, loading: Path) -> dict[str, str]:
    """Of processes that have the plugin, too."""
    about = tmp_path / "waiting-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: waiting\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwaiting = waiting_plugin:register\n"
    )
    (tmp_path / "waiting_plugin.py").write_text(WAITING_PLUGIN)
    return {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "LOADING": str(loading),
    }


@pytest.fixture
def started() -> Iterator[list[psutil.Process]]:
    """What a test started, which it may leave behind."""
    processes: list[psutil.Process] = []
    yield processes
    for each in filter(lives, processes):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def lives(process: psutil.Process) -> bool:
    """Whether it runs."""
    with suppress(psutil.NoSuchProcess):  # it may end between the two
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill_while_loading(
    front_end: int,
    loading: Path,
    num_workers: int,
    started: list[psutil.Process],
    log: Callable[[], str],
) -> None:
    """SIGKILL to a front end alone, while its workers load.

    Args:
        front_end: its process.
        loading: the folder of the fixture.
        num_workers: how many workers the engine has.
        started: gets what the front end has started.
        log: what the front end has said, which is printed if its workers do not load.

    """
    process = psutil.Process(front_end)

    def all_load() -> bool:
        assert lives(process), "the front end has ended"
        return len(list(loading.iterdir())) == num_workers

    try:
        until(all_load, "not all workers load", START_S)
    except AssertionError:
        print(log()[-8000:])
        raise
    started += process.children(recursive=True)
    os.kill(front_end, signal.SIGKILL)


def test_no_process_of_an_llm_stays_that_was_killed_while_it_started(
    old: Path,
    tmp_path: Path,
    env: dict[str, str],
    loading: Path,
    started: list[psutil.Process],
) -> None:
    """Its engine core and its worker are spawned; those of the server are forked."""
    told = tmp_path / "told"
    words = [LLM, str(old)]
    front_end = begin("-c", words, os.environ | env, told, told, spawned=True)
    kill_while_loading(front_end.pid, loading, 1, started, told.read_text)
    front_end.wait()
    until(lambda: not any(map(lives, started)), "a process stays", GONE_S)


def test_no_process_of_a_server_stays_that_was_killed_while_it_started(
    old: Path, env: dict[str, str], loading: Path, started: list[psutil.Process]
) -> None:
    flags = ("--data-parallel-size", "2", "--api-server-count", "2")
    env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    # vLLM 0.33 looks for a memory node for each engine else.
    env["VLLM_CPU_SIM_MULTI_NUMA"] = "0"
    server = Server(old, *flags, env=env)
    try:
        kill_while_loading(server.pid, loading, 2, started, server.log)
        # Two engine cores with a worker each, their coordinator, and two API servers
        assert len(started) >= 7
        until(lambda: not any(map(lives, started)), "a process stays", GONE_S)
    finally:
        server.stop()
