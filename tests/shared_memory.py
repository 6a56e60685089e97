"""Files in shared memory: what a test leaves behind there."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

from tests.waiting import until

FOLDER = Path("/dev/shm")


def names() -> set[str]:
    """Of all files of ours, those of tests that run beside this one included."""
    return {path.name for path in FOLDER.glob("vllm-inflight*")}


def nothing_came(known: set[str]) -> None:
    """No name beside `known` has come to stay; those of other tests go in the end."""
    until(lambda: names() <= known, "a name in shared memory outlived its use")


def sweep(since: float) -> None:
    """Remove vLLM's that came after `since` and that no process has mapped.

    Its queues and its exchange between ranks; of ours each test says itself.
    """
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mapped |= {each.path for each in process.memory_maps()}
    for path in (*FOLDER.glob("psm_*"), *FOLDER.glob("*-cpushm_*")):
        with suppress(FileNotFoundError):
            left = path.stat()
            is_ours = left.st_uid == os.getuid() and left.st_ctime >= since
            if is_ours and str(path) not in mapped:
                path.unlink()
