"""Breaks: a long loop lets other threads run, if its thread has asked for that.

One thread of a process runs Python at a time. The thread that stages an update goes
through the names of 100,000 tensors beside a thread that decodes, so it rests after
every millisecond of such a loop. What is short has no breaks: an update of a model with
hundreds of tensors would take longer by them, and decoding gain nothing. The same loops
are called elsewhere, where nobody waits for them: there they have no breaks either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from vllm.inflight.packed import SLICE_S, Work, resting

T = TypeVar("T")

SHORT_S = 0.01
"""What takes no longer has no break."""


class _Breaks:
    """The breaks of one thread, in one piece of its work."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest
        self._due = time.perf_counter() + SHORT_S

    def take_if_due(self) -> None:
        if time.perf_counter() >= self._due:
            self._rest()
            self._due = time.perf_counter() + SLICE_S


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


def done_with_breaks(work: Work[T]) -> T:
    """Do some work, with a break after every slice of time."""
    return resting(work, break_if_due)
