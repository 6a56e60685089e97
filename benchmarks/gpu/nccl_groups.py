"""What groups of NCCL leave behind in a process, without an engine; needs two GPUs.

`python -m benchmarks.gpu.nccl_groups --left 10 --killed 20`. This process opens one
group after another with a process on another GPU, as an engine does with its trainers.
The other process leaves the group, or is killed while this one waits for a broadcast.
After each group the program counts threads and descriptors, and reads resident memory.

What it finds with `NCCL_RAS_ENABLE=0` in the environment is without NCCL's service that
reports on peers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts
from vllm.inflight.transport.collective.nccl_api import UINT8, Library, UniqueId, config
from vllm.inflight.transport.waiting import WaitLimit

WAIT_S = 60.0
NUM_BYTES = 4 << 20
MAX_CTAS = 4


class Group:
    """A communicator of two ranks, and a broadcast from the first of them."""

    def __init__(self, unique_id: bytes, rank: int) -> None:
        self._nccl, self._comm = Library(), ctypes.c_void_p()
        self._device = torch.device("cuda", 1 - rank)
        self._stream = torch.cuda.Stream(self._device)
        self._tensor = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=self._device)
        settings = config(self._nccl.version, max_ctas=MAX_CTAS)
        with torch.cuda.device(self._device):
            self._nccl.call(
                "ncclCommInitRankConfig",
                ctypes.byref(self._comm),
                2,
                UniqueId.from_buffer_copy(unique_id),
                rank,
                ctypes.byref(settings),
            )
            self._settle("to connect")

    def broadcast(self) -> None:
        """Enqueue a broadcast; it ends when both ranks have done so."""
        at, stream = self._tensor.data_ptr(), self._stream.cuda_stream
        with torch.cuda.device(self._device):
            self._nccl.call(
                "ncclBroadcast", at, at, NUM_BYTES, UINT8, 0, self._comm, stream
            )
            self._settle("to broadcast")

    def synchronize(self) -> None:
        self._stream.synchronize()

    def abort(self) -> None:
        self._nccl.call("ncclCommAbort", self._comm)
        self.synchronize()

    def _settle(self, what: str) -> None:
        WaitLimit(WAIT_S).until(lambda: self._nccl.state(self._comm), f"NCCL {what}")


def be_peer() -> None:
    """The other process: makes the id, sends once, and leaves when its input ends."""
    unique_id = Library().unique_id()
    print(unique_id.hex(), flush=True)
    group = Group(unique_id, 0)
    group.broadcast()
    group.synchronize()
    sys.stdin.read()
    group.abort()


def meet(is_killed: bool) -> None:
    """Open a group with a new process, receive once, and leave or lose it."""
    command = [sys.executable, "-m", "benchmarks.gpu.nccl_groups", "--peer"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        try:
            group = Group(bytes.fromhex(peer.stdout.readline()), 1)
            group.broadcast()
            group.synchronize()
            if is_killed:
                group.broadcast()
                peer.kill()
                peer.wait()
            group.abort()
        except BaseException:
            peer.kill()
            raise
        if not is_killed:
            peer.stdin.close()


def open_files() -> Counter[str]:
    """What the descriptors of this process lead to, and how many to each."""
    found = Counter[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder's own is closed by now
            found[os.readlink(descriptor).partition(":[")[0]] += 1
    return found


def held() -> dict[str, Any]:
    """Threads, what descriptors lead to, and resident memory in MiB by its kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    memory = {
        kind: round(int(status[kind].split()[0]) / 1024, 2)
        for kind in ("RssAnon", "RssFile", "RssShmem")
    }
    return {
        "threads": int(status["Threads"]),
        "descriptors": dict(open_files()),
    } | memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--left", type=int, default=10, help="groups that are left")
    parser.add_argument("--killed", type=int, default=20)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    if options.peer:
        be_peer()
        return
    if torch.cuda.device_count() < 2:
        raise SystemExit("needs two GPUs, one for the other process")
    ras = os.environ.get("NCCL_RAS_ENABLE", "1")
    report: dict[str, Any] = {"machine": facts(), "nccl": Library().version, "ras": ras}
    report["groups"] = found = []
    options.out.mkdir(parents=True, exist_ok=True)
    for end in ["first", *["left"] * options.left, *["killed"] * options.killed]:
        meet(is_killed=end == "killed")
        found.append({"end": end} | held())
        print(json.dumps(found[-1]), flush=True)
        text = json.dumps(report, indent=1) + "\n"
        (options.out / f"nccl-groups-ras-{ras}.json").write_text(text)


if __name__ == "__main__":
    main()
