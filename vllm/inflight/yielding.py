"""Breaks: a long loop lets other threads run, if its thread has asked for breaks.

Only one thread of a process runs Python at a time. The staging thread loops over the
names of 100,000 tensors while another thread decodes, so it rests after every
millisecond. Short loops have no breaks: an update of some hundred tensors would take
longer, and decoding would gain nothing. Threads that did not ask for breaks run the
same loops without them.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from vllm.inflight.packed import SLICE_S, Work, resting

T = TypeVar("T")

SHORT_S = 0.01
"""Seconds of computation before the first break."""

SWITCH_S = 0.0001
"""The interpreter's switch interval in seconds while an update is staged.

The default of 5 ms is most of a decode step.
"""

NEVER = 1 << 30
"""A threshold of the garbage collector that no full collection reaches."""


class _Breaks:
    """The breaks of one thread during one piece of work."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest
        self._allow(SHORT_S)

    def _allow(self, seconds: float) -> None:
        self._until = time.thread_time() + seconds
        self._due = time.perf_counter() + seconds

    def take_if_due(self) -> None:
        if (now := time.perf_counter()) < self._due:
            return
        if (left := self._until - time.thread_time()) > 0:
            self._due = now + left  # the thread has waited, not computed
            return
        self._rest()
        self._allow(SLICE_S)


_breaks: ContextVar[_Breaks | None] = ContextVar("breaks", default=None)


@contextmanager
def resting_by(rest: Callable[[], None]) -> Iterator[None]:
    """Within this context, the thread calls `rest` at each break."""
    token = _breaks.set(_Breaks(rest))
    try:
        yield
    finally:
        _breaks.reset(token)


def break_if_due() -> None:
    """Take a break, if the thread has computed for a time slice since the last one."""
    if (breaks := _breaks.get()) is not None:
        breaks.take_if_due()


def with_breaks(entries: Iterable[T]) -> Iterator[T]:
    """Iterate with a break after every time slice."""
    if (breaks := _breaks.get()) is None:
        yield from entries
        return
    for entry in entries:
        yield entry
        breaks.take_if_due()


class _Sharing:
    """The interpreter's settings while threads work beside decoding.

    Several engines of one process can have one such thread each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads = 0
        self._usual = sys.getswitchinterval(), gc.get_threshold()[2]

    def begin(self) -> None:
        with self._lock:
            self._num_threads += 1
            if self._num_threads == 1:
                young, middle, full = gc.get_threshold()
                self._usual = sys.getswitchinterval(), full
                sys.setswitchinterval(min(SWITCH_S, self._usual[0]))
                gc.set_threshold(young, middle, NEVER)

    def end(self) -> None:
        with self._lock:
            self._num_threads -= 1
            young, middle, full = gc.get_threshold()
            if self._num_threads == 0:
                sys.setswitchinterval(self._usual[0])
                if full == NEVER:  # else other code has set it meanwhile
                    gc.set_threshold(young, middle, self._usual[1])


_sharing = _Sharing()


@contextmanager
def beside_decoding() -> Iterator[None]:
    """Within this context, threads switch more often and no full collection runs.

    Decoding alone is faster with fewer switches. A full garbage collection visits all
    objects of an update, such as the shapes of 100,000 tensors. Python 3.14 and newer
    have no such threshold, so there only the switch interval changes.
    """
    _sharing.begin()
    try:
        yield
    finally:
        _sharing.end()


def done_with_breaks(work: Work[T]) -> T:
    """Do the work, with a break after every time slice."""
    return resting(work, break_if_due)
