"""Turns: calls from other threads that run between two steps of an engine.

An engine with its own process steps on its main thread and takes calls from a
queue between steps. An engine in the caller's process steps whenever somebody
asks it for output; another thread must then neither call into the middle of a
step nor wait for a step that nobody makes. So a turn is queued: whoever steps
next runs it first, and if nobody steps, the thread that asked runs it.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

POLL_S = 0.001


class Turns:
    """The turns of one engine core."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        """Rouses the main thread of an engine with its own process."""
        self._end: SystemExit | None = None
        self._lock = threading.RLock()
        self._acting: int | None = None
        """The thread that acts itself, while the one that steps stands still."""
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have `call` run between two steps; returns at once."""
        future: Future[Any] = Future()
        self._queue.append((future, call))
        if self._wake is not None:
            self._wake()
        return future

    def run(self, call: Callable[[], Any]) -> Any:
        """Run `call` between two steps and wait for its result.

        For engines in the caller's process only.
        """
        if self._acting == threading.get_ident():
            return call()
        future = self.submit(call)
        while not future.done():
            # The stepping thread holds the lock for a step at a time and takes
            # it again at once, so waiting for the lock alone could take for ever.
            if self._lock.acquire(timeout=POLL_S):
                try:
                    self.drain()
                finally:
                    self._lock.release()
        return future.result()

    def drain(self) -> None:
        """Run what is queued; on the thread that steps, between two steps.

        Raises:
            SystemExit: a turn has ended the engine. No thread takes a step after that,
                whichever asked for the turn.

        """
        if self._end is not None:
            raise self._end
        while self._queue:
            try:
                future, call = self._queue.popleft()
            except IndexError:
                return
            try:
                with _uninterrupted():
                    future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            except BaseException as error:
                if isinstance(error, SystemExit):
                    self._end = error
                if not future.done():  # Ctrl-C comes after it
                    future.set_exception(error)
                raise

    @contextmanager
    def between(self) -> Iterator[None]:
        """Around what the calling thread does itself between two steps of another.

        A thread that steps takes the lock again as soon as it has let go of it, so that
        waiting for the lock may take for ever. Instead it is asked to stand still.
        """
        if self._acting == threading.get_ident():
            yield
            return
        stands, goes_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            stands.set()
            goes_on.wait()

        self.submit(stand_still)
        try:
            while not stands.is_set():
                if self._lock.acquire(timeout=POLL_S):
                    try:
                        if not stands.is_set():  # nobody steps: no need to ask
                            goes_on.set()
                            self.drain()
                            yield
                            return
                    finally:
                        self._lock.release()
            self._acting = threading.get_ident()
            yield
        finally:
            if self._acting == threading.get_ident():
                self._acting = None
            goes_on.set()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around whatever touches the scheduler in the caller's process."""
        if self._acting == threading.get_ident():
            yield
            return
        with self._lock:
            self.drain()
            yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a Ctrl-C come after a turn, and not into the middle of a flip.

    A second one comes at once: the turn may wait for something that never happens.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is None:
        yield
        return
    came: list[int] = []

    def remember(number: int, _: Any) -> None:
        came.append(number)
        signal.signal(number, usual)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        for number in came:
            signal.raise_signal(number)
