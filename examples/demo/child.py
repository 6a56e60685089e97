"""A child process that reports in lines of JSON, and ends with its parent.

Every line of its standard input is a command. The end of the input stops the child,
also if the parent was killed. So no process outlives the demo.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

Event = dict[str, Any]
END_S = 30.0


class Child:
    """`python -m module flags…` as a process of its own.

    Args:
        log: file of its standard error.

    """

    def __init__(self, module: str, *flags: str, log: Path) -> None:
        self._module = module
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C is for the parent, which then ends its children in order.
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._process.kill()
        self.release()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def order(self, **order: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def release(self) -> None:
        """Let the child stop; it finishes and reports its current work."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def events(self) -> Iterator[Event]:
        """Its reports until it ends; raises if it fails."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)
        if code := self._process.wait():
            raise RuntimeError(
                f"{self._module} ended with code {code}:\n"
                f"{self._log.read_text(errors='replace')[-4000:]}"
            )


def orders(at_end: Callable[[], None]) -> Iterator[Event]:
    """In the child: the lines of the parent; `at_end` is called when it lets go.

    Args:
        at_end: called in a thread, also while an order is being carried out.

    """
    lines: queue.Queue[Event | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(json.loads(line))
        at_end()
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, None)


def end_at_once() -> None:
    """In the child: for `at_end`, where there is nothing to be finished."""
    os._exit(0)


def report(event: str, **facts: Any) -> None:
    """In the child: one line to the parent."""
    print(json.dumps({"event": event, **facts}), flush=True)
