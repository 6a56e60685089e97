"""Background threads that end before the interpreter does.

If the interpreter ends while a daemon thread is inside native code, the process aborts
(exit code 134, "terminate called without an active exception"). So an exit hook asks
each of these threads to end, and waits for them for a bounded time.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import TypeVar

EXIT_S = 2.0
"""Most seconds that the exit hook waits for all threads together."""

NUM_FRAMES = 4
"""How many frames of a thread are told."""

T = TypeVar("T")


class Background(threading.Thread):
    """A thread that ends at exit, so that no caller has to join it."""

    def __init__(
        self,
        run: Callable[[], None] | None = None,
        *,
        name: str,
        end: Callable[[], None] | None = None,
    ) -> None:
        """Make the thread, and do not start it.

        Args:
            run: the work of the thread; a subclass may override `run` instead.
            name: the name of the thread.
            end: makes `run` return soon. The exit hook calls it; it must not block.

        """
        super().__init__(target=run, name=name, daemon=True)
        self._end = end

    def start(self) -> None:
        """Start the thread; from now on the exit hook ends it."""
        _join_at_exit()
        super().start()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._end = None  # it may refer to this thread, and keep it alive

    def end(self) -> None:
        """Ask the thread to end soon; does not wait."""
        if (end := self._end) is not None:
            end()


def in_background(call: Callable[[], T], name: str = "inflight-wire") -> Future[T]:
    """Run `call` in a thread of its own; return the future of its result."""
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


def where_is(thread: threading.Thread) -> str:
    """The innermost frames of a thread in Python, the newest first.

    It is empty where the thread has ended.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    return " < ".join(
        f"{Path(each.f_code.co_filename).name}:{line} {each.f_code.co_qualname}"
        for each, line in islice(walk_stack(frame), NUM_FRAMES)
    )


_is_registered = threading.Event()


def _join_at_exit() -> None:
    # Not at the import of this module: hooks run in the reverse order of their
    # registration, and another hook may clean up what these threads use.
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
