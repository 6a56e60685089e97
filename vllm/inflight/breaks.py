"""Breaks: a long loop lets other threads run, if its thread has asked for that.

One thread of a process runs Python at a time. The thread that stages an update goes
through the names of 100,000 tensors beside a thread that decodes, so it rests after
every millisecond of such a loop. The same loops are called elsewhere, where nobody
waits for them: there they have no breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from vllm.inflight.packed import Slice

T = TypeVar("T")


class _Breaks:
    """The breaks of one thread."""

    def __init__(self, rest: Callable[[], None]) -> None:
        self._rest = rest
        self._slice = Slice()

    def take_if_due(self) -> None:
        if self._slice.is_over():
            self._rest()
            self._slice = Slice()


_breaks: ContextVar[_Breaks | None] = ContextVar("breaks", default=None)


@contextmanager
def resting_by(rest: Callable[[], None]) -> Iterator[None]:
    """While this thread calls `rest` at each break of a loop."""
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
