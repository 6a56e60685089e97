"""The parent watchdog ends a process that vLLM started when its parent process dies.

By itself, an engine core does not notice that its front end was killed. It would keep
running with its workers and their GPU memory, and no new server could start.
`patch.child_processes` says which processes watch their parent.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess

from vllm.inflight import upstream

POLL_S = 1.0
PATIENCE_S = 5.0
"""Seconds for a process to end by itself after SIGTERM, as upstream gives it. An engine
core that still starts only takes a note of the signal."""

logger = upstream.init_logger(__name__)


def end_with_parent() -> None:
    """Start the watchdog; does nothing in a process without a parent process."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Not a `Background`, which ends at exit: this thread also ends a process that
        # hangs at exit. It never runs native code when the interpreter ends.
        threading.Thread(
            target=_watch,
            args=(parent, os.getppid()),
            name="inflight-parent",
            daemon=True,
        ).start()


def _watch(parent: BaseProcess, forked_by: int) -> None:
    # `forked_by` is the fork server, if there is one. If it died before `getppid` was
    # called, only the parent's pipe shows that. Other children of the parent keep that
    # pipe open, so both are checked.
    while os.getppid() == forked_by and parent.is_alive():
        time.sleep(POLL_S)
    logger.critical("process %d, which started this one, is gone", parent.pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)
