"""Files in shared memory: what a test leaves behind there."""

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil

from tests.support.waiting import until

FOLDER = Path("/dev/shm")
UPSTREAMS = "psm_*", "*-cpushm_*"
"""vLLM's queues, and its exchange between ranks."""


def names() -> set[str]:
    """Of all files of ours, those of tests that run beside this one included."""
    return {path.name for path in FOLDER.glob("vllm-inflight*")}


def nothing_came(known: set[str]) -> None:
    """No name beside `known` has come to stay; those of other tests go in the end."""
    until(lambda: names() <= known, "a name in shared memory outlived its use")


def sweep(since: float, patterns: Sequence[str] = UPSTREAMS) -> None:
    """Remove those that came after `since` and that no process has mapped.

    vLLM's, if nothing else is asked for; of ours each test says itself.
    """
    # Listed first: what another run of the tests creates meanwhile is not among them.
    paths = list(chain.from_iterable(map(FOLDER.glob, patterns)))
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mapped |= {each.path for each in process.memory_maps()}
    for path in paths:
        with suppress(FileNotFoundError):
            left = path.stat()
            is_ours = left.st_uid == os.getuid() and left.st_ctime >= since
            if is_ours and str(path) not in mapped:
                path.unlink()
