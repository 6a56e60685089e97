"""Whether this thread runs a method of a worker extension on the shadow weights.

What the method must not do is rejected. It may handle the error and report success, so
errors are noted as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.inflight.errors import Conflict

_here = threading.local()


def is_calling() -> bool:
    """Whether this thread runs a method of a worker extension on the shadow weights."""
    return getattr(_here, "is_calling", False)


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
def noting() -> Iterator[list[Conflict]]:
    """Context: gives the list of what is rejected in it, in this thread."""
    found: list[Conflict] = []
    before = getattr(_here, "rejections", None)
    _here.rejections = found
    try:
        yield found
    finally:
        _here.rejections = before


def rejected(error: Conflict) -> Conflict:
    """Note that something was rejected in this thread; returns the error.

    A thread that a method has started notes nothing: there the error ends the load.
    """
    if (found := getattr(_here, "rejections", None)) is not None:
        found.append(error)
    return error
