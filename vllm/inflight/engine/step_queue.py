"""The step queue: calls from other threads that run between two steps of an engine.

An engine with its own process steps on its main thread and takes calls from a queue
between steps. An engine in the caller's process steps only when the caller asks for
output. A call of another thread must neither interrupt a step nor wait for a step that
never comes. So the call is queued. The next step runs it first; without a step, the
thread that made the call runs it.

In the caller's process, Ctrl-C is delayed until a queued call has ended. A second one
takes effect at once, because the call may wait for ever. But it does not interrupt code
in `whole`, except inside of `waiting`.
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
    """The step queue of one engine core."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake = wake
        """Wakes the main thread of an engine with its own process."""
        self._end: SystemExit | None = None
        self._lock = threading.RLock()
        self._acting: int | None = None
        """The thread in `between`, while the stepping thread waits for it."""
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue `call` to run between two steps; returns at once."""
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
        """Run the queued calls, on the stepping thread between two steps.

        Raises:
            SystemExit: a call has ended the engine. No thread takes a step after that,
                whichever thread queued the call.

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
        """Let the calling thread act between two steps.

        A stepping thread takes the lock again as soon as it has released it, so waiting
        for the lock could take for ever. Instead a queued call stops that thread.
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
                        if not stands.is_set():  # no thread steps
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
        """Run a step in the caller's process, after the queued calls."""
        if self._acting == threading.get_ident():
            yield
            return
        with self._lock:
            self.drain()
            yield


class _Interrupts:
    """Signals of Ctrl-C that came during a queued call on the main thread."""

    def __init__(self) -> None:
        self.usual: Any = None
        self.came: list[int] = []
        self.is_whole = False

    def remember(self, number: int, _: object) -> None:
        """Handle a signal: delay the first one, and raise the second one now."""
        self.came.append(number)
        if len(self.came) > 1 and not self.is_whole:
            self.came.clear()
            signal.signal(number, self.usual)
            signal.raise_signal(number)


_interrupts: _Interrupts | None = None
"""The signals of the queued call that the main thread runs, if it runs one."""


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay a Ctrl-C until a queued call has ended, and raise a second one at once."""
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
    """Protect code that must not be left half done from Ctrl-C.

    The code has to end by itself, except for waits inside of `waiting`.
    """
    with _set_whole(True):
        yield


@contextmanager
def waiting() -> Iterator[None]:
    """Inside of `whole`, let a second Ctrl-C end a wait that may never end."""
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
