"""An engine core ends with the process that started it, and so does a worker.

A core notices nothing when its front end is killed: it stays for good, with its workers
and the memory of their GPUs, and no server can be started in its place. A worker
notices that its core is gone, and stays all the same if it waits for another rank.
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
PATIENCE_S = 10.0
"""For a process to end by itself, as it does at SIGTERM."""

logger = upstream.init_logger(__name__)


def end_with_parent() -> None:
    """From now on; nothing happens in a process that was not started as a child."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # Not one of those that end at exit: it ends a process that hangs there, too. It
        # never is in native code that would mind the end of the interpreter.
        threading.Thread(
            target=_watch,
            args=(parent, os.getppid()),
            name="inflight-parent",
            daemon=True,
        ).start()


def _watch(parent: BaseProcess, forked_by: int) -> None:
    # `forked_by` is the fork server, if there is one. It may have been gone before it
    # was asked for, which only the parent's pipe tells; and that pipe stays open in
    # whatever else the parent has forked.
    while os.getppid() == forked_by and parent.is_alive():
        time.sleep(POLL_S)
    logger.critical("process %d, which started this one, is gone", parent.pid)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)
