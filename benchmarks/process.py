"""The processes of a benchmark's arms: started, asked for rounds, and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from benchmarks.machine import Usage
from benchmarks.record import UPSTREAM, Plan, Record

PATIENCE_S = 400.0
"""Longest wait for an arm; a round takes a tenth of it."""

AS_IT_IS = {"VLLM_PLUGINS": ""}
"""An empty list of plugins: upstream's."""


@contextmanager
def arm(
    name: str,
    module: str,
    checkpoint: Path,
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ArmProcess]:
    """Run `python -m module` with an engine in it, and end it on every exit.

    Args:
        name: name of the arm; `upstream` has the plugin switched off.
        log: file of its output.
        environment: variables that it has beside this process's.

    """
    near, far = Pipe()
    with (
        open(log, "wb") as output,
        subprocess.Popen(
            [
                *(sys.executable, "-m", module),
                *(name, str(checkpoint), str(far.fileno())),
            ],
            env={k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
            | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
            | (AS_IT_IS if name == UPSTREAM else {})
            | dict(environment or {}),
            pass_fds=[far.fileno()],
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        far.close()
        started = ArmProcess(name, process, near, log)
        try:
            started.answer()
            yield started
        finally:
            started.end()


class ArmProcess:
    """The connection to an arm."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], pipe: Connection, log: Path
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._log = log
        self._process = process
        self._pipe = pipe
        self.records: list[Record] = []
        self.others: list[float] = []

    def carry_out(self, plan: Plan) -> Record:
        """Let the arm do one round."""
        before = Usage.now(os.getpid())
        self._pipe.send(plan)
        record: Record = self.answer()
        self.others.append(before.others(Usage.now(os.getpid())))
        self.records.append(record)
        return record

    def answer(self) -> Any:
        """The arm's next message; exits if the arm has died or is silent."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            while not self._pipe.poll(0.5):
                if time.monotonic() > deadline:
                    raise EOFError
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(
                f"the arm {self.name!r} gave no answer; see {self._log}"
            ) from None

    def end(self) -> None:
        """Ask the arm to end; after a while, kill it and its descendants."""
        try:
            self._pipe.send(None)
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            # Its engine's processes are in its session; none may outlive it.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
