"""Turns: calls from other threads that run between two steps of an engine.

An engine with its own process steps on its main thread and takes calls from a
queue between steps. An engine in the caller's process steps whenever somebody
asks it for output; another thread must then neither call into the middle of a
step nor wait for a step that nobody makes. So a turn is queued: whoever steps
next runs it first, and if nobody steps, the thread that asked runs it.

Ctrl-C in the caller's process comes after a turn. A second one comes at once, as the
turn may wait for something that never happens; but it never comes into what has to
happen `whole`, except where that is `waiting`.
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


class StepQueue:
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
        """Around what the calling thread does itself between two steps.

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
                            with _uninterrupted():
                                yield
                            return
                    finally:
                        self._lock.release()
            self._acting = threading.get_ident()
            with _uninterrupted():
                yield
        finally:
            if self._acting == threading.get_ident():
                self._acting = None
            goes_on.set()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step in the caller's process."""
        if self._acting == threading.get_ident():
            yield
            return
        with self._lock:
            self.drain()
            yield


class _Interrupts:
    """The Ctrl-C that came during a turn; of the main thread alone."""

    def __init__(self) -> None:
        self.usual: Any = None
        self.came: list[int] = []
        self.is_whole = False

    def remember(self, number: int, _: object) -> None:
        """Handle a signal: it comes later, or is the second and comes now."""
        self.came.append(number)
        if len(self.came) > 1 and not self.is_whole:
            self.came.clear()
            signal.signal(number, self.usual)
            signal.raise_signal(number)


_interrupts: _Interrupts | None = None
"""Of the turn that the main thread runs, if there is one."""


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a Ctrl-C come after a turn, and a second one at once."""
    global _interrupts
    usual = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or usual is None or _interrupts is not None:
        yield
        return
    interrupts = _interrupts = _Interrupts()
    interrupts.usual = usual
    signal.signal(signal.SIGINT, interrupts.remember)
    try:
        yield
    finally:
        _interrupts = None
        signal.signal(signal.SIGINT, usual)
        for number in interrupts.came:
            signal.raise_signal(number)


@contextmanager
def whole() -> Iterator[None]:
    """Around what must not be left half done: no Ctrl-C comes into it.

    It has to come to an end by itself, but for what is `waiting`.
    """
    with _set_whole(True):
        yield


@contextmanager
def waiting() -> Iterator[None]:
    """Inside of `whole`, around a wait that may never end: a second Ctrl-C ends it."""
    with _set_whole(False):
        yield


@contextmanager
def _set_whole(is_whole: bool) -> Iterator[None]:
    interrupts = _interrupts
    if interrupts is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before, interrupts.is_whole = interrupts.is_whole, is_whole
    try:
        yield
    finally:
        interrupts.is_whole = before
