"""Calls under Triton's interpreter, each in a fork of one process that has it.

Triton is told to interpret before it is imported, so a test cannot do so itself. To
import torch and vLLM is most of what a short check of a kernel takes, and a process of
this module does it once for the tests of a lane.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

PRELOADED = (
    "tests.support.deltas",
    "tests.support.shadow_on_host",
    "vllm.inflight.trainer",
)
"""What most checks import."""
TIMEOUT_S = 240
"""A call that takes longer is ended by a signal."""


class Interpreter:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, call: str, told: Path) -> int:
        """Run `module:function`; returns its exit code, which is 0 if it returned.

        Args:
            call: of a function without arguments.
            told: the file that gets what it prints.

        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{call}\t{told}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@functools.cache
def interpreter() -> Interpreter:
    """The process of this lane, which ends with it."""
    made = Interpreter()
    atexit.register(made.close)
    return made


def succeeds(call: str) -> None:
    """Run `module:function` under the interpreter; fails with its last lines."""
    with TemporaryDirectory(prefix="interpreter-") as folder:
        told = Path(folder) / "told"
        code = interpreter().run(call, told)
        last = told.read_text(errors="replace")[-3000:]
        assert code == 0, f"it ended with {code}\n{last}"


def serve() -> None:
    """Run calls from stdin until it ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    patch_language_once()
    importlib.import_module("tests.support.calm.engine_starts").freeze_imports()
    for line in sys.stdin:
        call, told = line.rstrip("\n").split("\t")
        child = os.fork()
        if not child:
            _run(call, told)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def patch_language_once() -> None:
    """Have Triton put its interpreter into its language once, and not for each call.

    It looks through all names of the language at each launch of a kernel, and at each
    call of a function within one: a third of what the kernels here take.
    """
    from triton import language
    from triton.runtime import interpreter

    everything = SimpleNamespace(__globals__={"tl": language, "core": language.core})
    interpreter._patch_lang(everything)
    nothing_more = SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda fn: nothing_more


def _run(call: str, told: str) -> None:
    """Run a call in this process, and end it."""
    signal.alarm(TIMEOUT_S)
    file = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(file, number)
    code = 1
    try:
        module, name = call.split(":")
        getattr(importlib.import_module(module), name)()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
