"""The environment variables of the process while an NCCL group is opened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vllm.inflight import upstream

# The environment belongs to the process, and so do these: engines of one process that
# open groups at the same time must share them.
_lock = threading.Lock()
_num_inside = 0
_removal = ExitStack()


@contextmanager
def unpinned() -> Iterator[None]:
    """A context without the NCCL variables that upstream sets for its own groups.

    A trainer's process does not have these variables, and all ranks must agree. Several
    threads may open groups at once: the first removes the variables, and the last
    restores them.
    """
    global _num_inside
    with _lock:
        if not _num_inside:
            _removal.enter_context(upstream.unpinned_nccl_env())
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside:
                _removal.close()
