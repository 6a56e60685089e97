"""Processes that begin where vLLM is imported already.

Importing it is most of what a short test of a process waits for: 7 s of a core for each
process, and a server has three, one after the other. Those here are forked off a server
that did it once for the tests of a lane, and their engine cores and workers off them,
as vLLM's are on GPUs; on a CPU it has them spawned, for the sake of threads that one
core has none of.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import context as contexts
from multiprocessing import process as processes
from multiprocessing import resource_tracker as tracker
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from prometheus_client import values
from setproctitle import setproctitle

OF_ENGINES = [
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]
OF_TRAINERS = ["vllm.distributed.weight_transfer.factory"]
"""Engines on a GPU are spawned: this is enough for what is started beside them."""
IS_ON_CPU = not torch.accelerator.is_available()

TOO_LATE = ("OMP_NUM_THREADS", "VLLM_PLUGINS")
"""Variables of the environment that are read, or may be, while vLLM is imported."""
READ = {name: os.environ.get(name) for name in TOO_LATE}
FOLDERS = os.environ.get("PYTHONPATH", "")
"""Where modules are found. A process may have more folders before these."""

nursery = multiprocessing.get_context("forkserver")
nursery.set_forkserver_preload(
    [*OF_ENGINES, "tests.support.calm.frozen"] if IS_ON_CPU else OF_TRAINERS
)


def begin(
    module: str,
    words: Sequence[str],
    env: dict[str, str],
    stdout: Path,
    stderr: Path,
    *,
    spawned: bool = False,
) -> Nursling | subprocess.Popen[bytes]:
    """`python -m module words…` in its own session; spawned, too, if `env` asks for it.

    A forked one forks its engine, which Ray does not live through. As module `-c`, with
    code for the first word, it is `python -c code words…`.
    """
    if is_as_preloaded(env) and not spawned:
        return Nursling(module, words, env, stdout, stderr)
    with stdout.open("ab") as out, stderr.open("ab") as err:
        return subprocess.Popen(
            [sys.executable, *typed(module, words)],
            env=env,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def run(
    module: str,
    *words: str,
    env: dict[str, str] | None = None,
    timeout_s: float = 240,
    spawned: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As `begin`, with `env` beside our own, and to the end of all that it started."""
    with TemporaryDirectory(prefix="process-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        env = os.environ | (env or {})
        process = begin(module, words, env, out, err, spawned=spawned)
        try:
            code = process.wait(timeout_s)
        finally:
            # With the engine's processes, which would outlive one that hangs.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told = [path.read_text(errors="replace") for path in (out, err)]
    return subprocess.CompletedProcess(typed(module, words), code, *told)


def is_as_preloaded(env: Mapping[str, str]) -> bool:
    """Whether vLLM would be imported with `env` as it was for what is forked off."""
    is_late = {name: env.get(name) for name in TOO_LATE} != READ
    is_elsewhere = not env.get("PYTHONPATH", "").endswith(FOLDERS)
    return IS_ON_CPU and not (is_late or is_elsewhere)


def typed(module: str, words: Sequence[str]) -> list[str]:
    """What follows `python` on the command line."""
    return ["-c", *words] if module == "-c" else ["-m", module, *words]


class Nursling:
    """`python -m module words…` in a session of its own; as a `subprocess.Popen`.

    Attributes:
        pid: of the process, which leads its own group.

    """

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        env: dict[str, str],
        stdout: Path,
        stderr: Path,
    ) -> None:
        facts = (module, list(words), env, str(stdout), str(stderr))
        self._process = nursery.Process(target=_live, args=facts)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit code."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Preloaded(contexts.ForkServerProcess):
    """As a spawned process of `multiprocessing`, which has the environment of now."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        os.environ.clear()
        os.environ.update(self._environment)
        return super()._bootstrap(parent_sentinel)

    @staticmethod
    def _Popen(process: processes.BaseProcess) -> Any:
        is_forked = is_as_preloaded(os.environ)
        by = contexts.ForkServerProcess if is_forked else contexts.SpawnProcess
        return by._Popen(process)


def preload_spawned() -> None:
    """From here on, what this process spawns has vLLM imported already, on a CPU.

    That is workers of an engine in this process, and trainers beside it.
    """
    spawn = contexts.SpawnContext()
    spawn.Process = Preloaded
    contexts._concrete_contexts["spawn"] = spawn


def _live(
    module: str, words: list[str], env: dict[str, str], stdout: str, stderr: str
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for path, number in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    # Before the environment moves: titles are written over the first one.
    setproctitle(" ".join([sys.executable, *typed(module, words)]))
    os.environ.clear()
    os.environ.update(env)
    more = env.get("PYTHONPATH", "").removesuffix(FOLDERS)
    sys.path[:0] = [folder for folder in more.split(os.pathsep) if folder]
    # A tracker of shared memory that ends with this family, and not with the tests.
    tracker._resource_tracker._fd = tracker._resource_tracker._pid = None
    os.register_at_fork(after_in_child=_count)
    contexts._concrete_contexts["spawn"] = contexts._concrete_contexts["fork"]
    # The first of its family, as one that was typed in.
    processes._parent_process = None
    processes.current_process().name = "MainProcess"
    try:
        if module == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(words[0], {"__name__": "__main__"})
        else:
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # as at the end of any that was not forked


def _count() -> None:
    """Several API servers count in files: what does is chosen by the environment."""
    values.ValueClass = values.get_value_class()
