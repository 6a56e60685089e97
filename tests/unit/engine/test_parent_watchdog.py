"""An engine core whose front end was killed does not stay behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.waiting import until

pytestmark = pytest.mark.seconds

FRONT_END = """
import multiprocessing, os, signal, sys, time

def core(kind):
    from vllm.inflight.engine import parent_watchdog as parent
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        parent.PATIENCE_S = 1.0
    os.write(1, f"{os.getpid()}\\n".encode())  # whole, whatever buffers
    while kind == "late" and multiprocessing.parent_process().is_alive():
        time.sleep(0.1)
    parent.end_with_parent()
    time.sleep(600)

if __name__ == "__main__":
    method, *kinds = sys.argv[1:]
    if method == "fork":
        import vllm.inflight.engine.parent_watchdog  # once for all
    context = multiprocessing.get_context(method)
    for kind in kinds:
        context.Process(target=core, args=(kind,)).start()
    time.sleep(600)
"""


KINDS = ["plain", "deaf", "late"]


@pytest.mark.parametrize(
    "method, kinds",
    [
        ("fork", KINDS),
        # Each of these imports vLLM.
        pytest.param("forkserver", KINDS, marks=pytest.mark.slow),
        pytest.param("spawn", KINDS, marks=pytest.mark.slow),
    ],
)
def test_cores_end_when_their_front_end_is_killed(
    method: str, kinds: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "front_end.py"
    script.write_text(FRONT_END)
    front_end = subprocess.Popen(
        [sys.executable, str(script), method, *kinds],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert front_end.stdout is not None
    cores: list[psutil.Process] = []
    try:
        with front_end.stdout as told:
            cores += [psutil.Process(int(told.readline())) for _ in kinds]
        time.sleep(2)  # two looks at a parent that lives
        assert all(map(lives, cores))
        os.kill(front_end.pid, signal.SIGKILL)
        front_end.wait()
        until(lambda: not any(map(lives, cores)), "a core stays behind", 60)
    finally:
        front_end.kill()
        front_end.wait()
        for each in filter(lives, cores):
            with suppress(psutil.NoSuchProcess):
                each.kill()


def lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end between the two
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
