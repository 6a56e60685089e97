"""What the process's environment has to be while an NCCL group is opened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vllm.inflight import upstream

_lock = threading.Lock()
_inside = 0
_taken = ExitStack()


@contextmanager
def unpinned() -> Iterator[None]:
    """Without the NCCL variables that upstream sets for its own groups.

    A trainer has not got them. Groups may open in several threads at once: the first
    takes the variables away and the last one brings them back.
    """
    global _inside
    with _lock:
        if not _inside:
            _taken.enter_context(upstream.unpinned_nccl_env())
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _taken.close()
