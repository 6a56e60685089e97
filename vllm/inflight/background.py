"""Threads of ours, all of which end before the interpreter does.

A daemon thread that is inside native code when the interpreter ends makes the process
abort (exit code 134, "terminate called without an active exception"). So at exit each
thread of ours is told to end, and is waited for, up to a bound.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

EXIT_S = 2.0
"""Seconds that all threads together are waited for when the interpreter ends."""

T = TypeVar("T")


class Background(threading.Thread):
    """A thread that nobody has to wait for, and that ends at exit."""

    def __init__(
        self,
        run: Callable[[], None] | None = None,
        *,
        name: str,
        end: Callable[[], None] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            run: what the thread does; a subclass may override `run` instead.
            name: of the thread.
            end: makes `run` return soon; called at exit, must not block.

        """
        super().__init__(target=run, name=name, daemon=True)
        self._end = end

    def start(self) -> None:
        """Start it; from now on it is one of those that end at exit."""
        _join_at_exit()
        super().start()

    def run(self) -> None:
        """What it was made for."""
        try:
            super().run()
        finally:
            self._end = None  # it may lead back here, and keep alive what has ended

    def end(self) -> None:
        """Have it end soon, if there is a way; does not wait for that."""
        if (end := self._end) is not None:
            end()


def in_background(call: Callable[[], T], name: str = "inflight-wire") -> Future[T]:
    """Call it in a thread of its own; returns the future of its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Background(run, name=name).start()
    return future


_is_registered = threading.Event()


def _join_at_exit() -> None:
    # Not when this module is imported. Hooks run in the reverse order of their
    # registration, and what our threads use may be cleaned up by a hook as well.
    if not _is_registered.is_set():
        _is_registered.set()
        atexit.register(_end_all)


def _end_all() -> None:
    until = time.monotonic() + EXIT_S
    ours = [each for each in threading.enumerate() if isinstance(each, Background)]
    for each in ours:
        each.end()
    for each in ours:
        each.join(max(0.0, until - time.monotonic()))
