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

POLL_S = 0.02
"""How often a call that ends asks whether to wait for a thread that loads."""

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
        decoding: the groups of ranks that decode; see adopted/guard.py.
        guard: what looks at operators of torch until the method has returned.
        late_memory: where the threads of the call may not write from then on.

    """

    def __init__(self, method: str, note: Callable[[Conflict], None]) -> None:
        self.method, self._note = method, weakref.WeakMethod(note)
        self.is_over = False
        self.decoding: Any = None
        self.guard: Any = None
        self.late_memory: Any = None
        self.has_threads = self._is_told = False
        self._turn = threading.Condition()
        """Of whoever reads or changes what follows; notified when a load has ended."""
        self._loader: threading.Thread | None = None
        """The thread that loads."""
        self._is_outside = False
        """Whether that thread runs code of the extension: its iterator."""

    def reject(self, error: Conflict) -> Conflict:
        """Note what was rejected, unless the update has ended; returns the error."""
        if (note := self._note()) is not None:
            note(error)
        if self.is_over and not self._is_told:  # nobody waits for an answer any more
            self._is_told = True
            logger.error("%s", error.message)
        return error

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context: this thread loads tensors.

        Raises:
            Conflict: the call is over, or another thread of it loads.

        """
        this = threading.current_thread()
        with self._turn:
            is_over, before = self.is_over, (self._loader, self._is_outside)
            is_free = self._loader is None or self._loader is this
            if not is_over and is_free:
                self._loader, self._is_outside = this, False
        if is_over:
            raise self.reject(late(self.method, "loads tensors"))
        if not is_free:
            raise self.reject(
                Conflict(
                    f"{self.method} of the worker extension loads tensors in two "
                    "threads at once; load in one after the other"
                )
            )
        try:
            yield
        finally:
            with self._turn:
                self._loader, self._is_outside = before
                self._turn.notify_all()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Context: the thread that loads runs code of the extension, its iterator.

        Raises:
            Conflict: the call has ended meanwhile.

        """
        with self._turn:
            self._is_outside = True
        try:
            yield
        finally:
            with self._turn:
                self._is_outside = False
        if self.is_over:
            raise self.reject(late(self.method, "loads tensors"))

    def end(self, waits: Callable[[threading.Thread], bool] = lambda _: True) -> None:
        """End the call: from now on no thread of it loads or writes.

        Returns when a load that is under way in a thread has ended. A thread that is
        not waited for any more is left in its iterator, and loads nothing of what that
        still gives. It is never left inside the update loader.

        Args:
            waits: called again and again with the thread that loads; whether to wait
                for it.

        """
        with self._turn:
            while (loader := self._loader) is not None:
                if not waits(loader) and self._is_outside:
                    break
                self._turn.wait(POLL_S)
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


def require_in_time() -> None:
    """Raise `Conflict` in a thread whose call is over."""
    if (call := current()) is not None and call.is_over:
        raise rejected(late(call.method, "loads tensors"))


def rejected(error: Conflict) -> Conflict:
    """Note that something was rejected in this thread; returns the error."""
    call = current()
    return error if call is None else call.reject(error)


def late(method: str, what: str) -> Conflict:
    """The error of a thread that goes on after its method has returned."""
    return Conflict(
        f"a thread of {method} of the worker extension {what} after the method has "
        "returned; it was rejected, since the memory may have another version by then. "
        "Let the method wait for its threads, or start the engine with "
        "--inflight-adopt off"
    )
