"""Breaks: a long loop lets other threads run, if its thread has asked for that.

One thread of a process runs Python at a time. The thread that stages an update goes
through the names of 100,000 tensors beside a thread that decodes, so it rests after
every millisecond of such a loop. What is short has no breaks: an update of a model with
hundreds of tensors would take longer by them, and decoding gain nothing. The same loops
are called elsewhere, where nobody waits for them: there they have no breaks either.
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
"""What computes no longer has no break."""

SWITCH_S = 0.0001
"""How long the interpreter leaves its lock with a thread that does not let go of it.

The default, 5 ms, is most of a decode step."""

NEVER = 1 << 30
"""Collections of what is younger, until there is a full one."""


class _Breaks:
    """The breaks of one thread, in one piece of its work."""

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
            self._due = now + left  # it has waited for something meanwhile
            return
        self._rest()
        self._allow(SLICE_S)


_breaks: ContextVar[_Breaks | None] = ContextVar("breaks", default=None)


@contextmanager
def resting_by(rest: Callable[[], None]) -> Iterator[None]:
    """A piece of work, in which this thread calls `rest` at each break."""
    token = _breaks.set(_Breaks(rest))
    try:
        yield
    finally:
        _breaks.reset(token)


def break_if_due() -> None:
    """A break, if this thread has computed for a slice of time since the last one."""
    if (breaks := _breaks.get()) is not None:
        breaks.take_if_due()


def with_breaks(entries: Iterable[T]) -> Iterator[T]:
    """The entries of a long loop, with a break after every slice of time."""
    if (breaks := _breaks.get()) is None:
        yield from entries
        return
    for entry in entries:
        yield entry
        breaks.take_if_due()


class _Sharing:
    """How the interpreter is shared while threads work beside decoding.

    There may be several: of engines in one process, one each.
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
                if full == NEVER:  # else somebody else has set it meanwhile
                    gc.set_threshold(young, middle, self._usual[1])


_sharing = _Sharing()


@contextmanager
def beside_decoding() -> Iterator[None]:
    """Threads take turns more often, and garbage is looked for in what is young alone.

    Decoding alone is faster with fewer turns. A full collection goes through all that
    an update holds, such as the shapes of 100,000 tensors. Python 3.14 and newer have
    no such threshold: there this is without effect.
    """
    _sharing.begin()
    try:
        yield
    finally:
        _sharing.end()


def done_with_breaks(work: Work[T]) -> T:
    """Do some work, with a break after every slice of time."""
    return resting(work, break_if_due)
