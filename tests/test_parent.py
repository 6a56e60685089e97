"""An engine core whose front end was killed does not stay behind."""

import os
import signal
import subprocess
import sys
import time

import psutil

FRONT_END = """
import multiprocessing, time
from vllm.inflight.engine import parent

def core(is_deaf):
    if is_deaf:
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        parent.PATIENCE_S = 1.0
    parent.end_with_parent()
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    cores = [context.Process(target=core, args=(deaf,)) for deaf in (False, True)]
    for each in cores:
        each.start()
    print(*(each.pid for each in cores), flush=True)
    time.sleep(600)
"""


def test_cores_end_when_their_front_end_is_killed_also_one_that_does_not_listen() -> (
    None
):
    front_end = subprocess.Popen(
        [sys.executable, "-c", FRONT_END], stdout=subprocess.PIPE, text=True
    )
    assert front_end.stdout is not None
    with front_end.stdout as told:
        cores = [psutil.Process(int(pid)) for pid in told.readline().split()]
    try:
        time.sleep(2)
        assert len(cores) == 2 and all(map(lives, cores))
        os.kill(front_end.pid, signal.SIGKILL)
        front_end.wait()
        ends = time.monotonic() + 60
        while any(map(lives, cores)):
            assert time.monotonic() < ends, "a core stays behind"
            time.sleep(0.1)
    finally:
        for each in filter(lives, cores):
            each.kill()


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
