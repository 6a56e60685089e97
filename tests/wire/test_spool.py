"""Tensors of a request in shared memory: gone with it, whatever became of it."""

import base64
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from vllm.inflight.errors import EngineFault
from vllm.inflight.wire import spool as room
from vllm.inflight.wire.local import SHARED_MEMORY
from vllm.inflight.wire.spool import spooled

ENTRY = base64.b64encode(save({"a": torch.ones(2)})).decode()
KILLED = """if True:
    import os, signal, sys
    from vllm.inflight.wire import spool as room
    room.PREFIX = sys.argv[1]
    with room.spooled([sys.argv[2]], None, allow_pickle=False) as (name,):
        print(name, flush=True)
        sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def prefix(monkeypatch) -> str:
    own = f"vllm-inflight-tests-{os.getpid()}-{time.time_ns()}-"
    monkeypatch.setattr(room, "PREFIX", own)
    return own


def left(prefix: str) -> list[Path]:
    return sorted(SHARED_MEMORY.glob(prefix + "*"))


def spool() -> list[dict[str, list[float]]]:
    with spooled([ENTRY, ENTRY], None, allow_pickle=False) as names:
        files = [load_file(SHARED_MEMORY / name) for name in names]
        return [{n: t.tolist() for n, t in file.items()} for file in files]


def test_the_files_are_there_as_long_as_they_are_read(prefix):
    assert spool() == [{"a": [1.0, 1.0]}] * 2
    assert left(prefix) == []


def test_without_room_the_reason_is_told_and_nothing_stays(prefix, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(EngineFault, match="no space left"):
        spool()
    assert left(prefix) == []


def test_what_a_killed_server_has_left_is_swept_and_what_a_living_one_has_is_not(
    prefix,
):
    command = [sys.executable, "-c", KILLED, prefix, ENTRY]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        file = SHARED_MEMORY / server.stdout.readline().strip()
        long_ago = time.time() - 1000
        os.utime(file, (long_ago, long_ago))
        spool()
        assert left(prefix) == [file]
        server.send_signal(signal.SIGKILL)
    assert left(prefix) == [file]
    spool()
    assert left(prefix) == []
