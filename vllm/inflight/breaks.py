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

_rest: ContextVar[Callable[[], None] | None] = ContextVar("rest", default=None)


@contextmanager
def resting_by(rest: Callable[[], None]) -> Iterator[None]:
    """While this thread calls `rest` at each break of a loop."""
    token = _rest.set(rest)
    try:
        yield
    finally:
        _rest.reset(token)


def with_breaks(entries: Iterable[T]) -> Iterator[T]:
    """The entries of a long loop, with a break after every slice of time."""
    if (rest := _rest.get()) is None:
        yield from entries
        return
    piece = Slice()
    for entry in entries:
        yield entry
        if piece.is_over():
            rest()
            piece = Slice()
