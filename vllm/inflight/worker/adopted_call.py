"""A method of a worker extension that runs on the shadow weights, and its threads.

What the method must not do is rejected. It may handle the error and report success, so
errors are noted as well.

A thread that the method starts belongs to its call, with all threads that it starts in
turn. They follow the rules of the method. When the method has returned, they may not
load or write any more: their version may be committed by then, and the memory be that
of another one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.errors import Conflict

logger = upstream.init_logger(__name__)

_here = threading.local()


class AdoptedCall:
    """One call of such a method.

    Args:
        method: its name.
        note: takes each error of what was rejected, from any thread. It is a method of
            an object that is not kept alive here: a thread may outlive its update.

    Attributes:
        is_over: whether the method has returned.
        has_threads: whether the method has started a thread.
        is_told: whether the log says that a thread of it goes on.
        guard: what looks at operators of torch until then; see adopted/guard.py.
        late_memory: where the threads of the call may not write from then on.

    """

    def __init__(self, method: str, note: Callable[[Conflict], None]) -> None:
        self.method, self._note = method, weakref.WeakMethod(note)
        self.is_over = False
        self.guard: Any = None
        self.late_memory: Any = None
        self.has_threads = self.is_told = False
        self._turn = threading.RLock()
        """Of the thread that loads."""

    def note(self, error: Conflict) -> None:
        """Note what was rejected, unless the update has ended."""
        if (note := self._note()) is not None:
            note(error)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context: this thread loads tensors.

        Raises:
            Conflict: the call is over, or another thread of it loads.

        """
        if not self._turn.acquire(blocking=False):
            raise rejected(
                Conflict(
                    f"{self.method} of the worker extension loads tensors in two "
                    "threads at once; load in one after the other"
                )
            )
        try:
            if self.is_over:
                raise rejected(late(self.method, "loads tensors"))
            yield
        finally:
            self._turn.release()

    def end(self) -> None:
        """End the call: from now on no thread of it loads or writes.

        Returns when a load that is under way in a thread has ended.
        """
        with self._turn:
            if self.has_threads:
                self.late_memory = self.guard.late_memory()
            self.is_over, self.guard = True, None


def current() -> AdoptedCall | None:
    """The call that this thread belongs to; it may be over."""
    call: AdoptedCall | None = getattr(_here, "call", None)
    return call


def is_calling() -> bool:
    """Whether this thread runs a method of a worker extension on the shadow weights."""
    call = current()
    is_over = call is not None and call.is_over
    return getattr(_here, "is_calling", False) and not is_over


def is_of_method() -> bool:
    """Whether this thread runs such a method, or was started by one that has ended."""
    return getattr(_here, "is_calling", False)


@contextmanager
def running(call: AdoptedCall) -> Iterator[None]:
    """Context: this thread belongs to a call."""
    before = current()
    _here.call = call
    try:
        with calling(True):
            yield
    finally:
        _here.call = before


@contextmanager
def calling(is_calling: bool) -> Iterator[None]:
    """Context: this thread runs such a method, or it runs the update loader."""
    before = getattr(_here, "is_calling", False)
    _here.is_calling = is_calling
    try:
        yield
    finally:
        _here.is_calling = before


@contextmanager
def loading() -> Iterator[None]:
    """Context: this thread loads tensors for its call; see `AdoptedCall.loading`."""
    if (call := current()) is None:
        yield
        return
    with call.loading():
        yield


def require_in_time() -> None:
    """Raise `Conflict` in a thread whose call is over."""
    if (call := current()) is not None and call.is_over:
        raise rejected(late(call.method, "loads tensors"))


def rejected(error: Conflict) -> Conflict:
    """Note that something was rejected in this thread; returns the error."""
    if (call := current()) is not None:
        call.note(error)
        if call.is_over and not call.is_told:  # nobody waits for an answer any more
            call.is_told = True
            logger.error("%s", error.message)
    return error


def late(method: str, what: str) -> Conflict:
    """The error of a thread that goes on after its method has returned."""
    return Conflict(
        f"a thread that {method} of the worker extension has started {what} after the "
        "method has returned; it was rejected, since the memory may have another "
        "version by then. Let the method wait for its threads, or start the engine "
        "with --inflight-adopt off"
    )
