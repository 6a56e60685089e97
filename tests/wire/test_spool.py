"""Tensors of a request in shared memory: gone with it, whatever became of it."""

import base64
import errno
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from vllm.inflight.errors import EngineFault, Malformed
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


def bucket(names: list[str]) -> str:
    parts = [
        {"name": name, "shape": [1], "dtype": "uint8", "start_idx": i, "end_idx": i + 1}
        for i, name in enumerate(names)
    ]
    whole = {"flattened_tensor": torch.arange(len(names), dtype=torch.uint8)}
    return base64.b64encode(save(whole, {"metadata": json.dumps(parts)})).decode()


def pickled(names: list[str]) -> str:
    pairs = [(name, torch.ones(1)) for name in names]
    return base64.b64encode(pickle.dumps(pairs)).decode()


@pytest.mark.parametrize("low", [2, 3, 4, 5])
def test_a_safetensors_file_that_begins_and_ends_like_a_pickle_is_one(low):
    length = low << 8 | 0x80  # of the header: the first two bytes of a pickle
    data = save({"a": torch.tensor([1, 2, ord(".")], dtype=torch.uint8)})
    header = data[8 : 8 + int.from_bytes(data[:8], "little")].ljust(length)
    file = length.to_bytes(8, "little") + header + data[-3:]
    assert len(file) == length + 11
    entry = base64.b64encode(file).decode()
    with spooled([entry], None, allow_pickle=False) as (name,):
        assert load_file(SHARED_MEMORY / name)["a"].tolist() == [1, 2, ord(".")]


@pytest.mark.parametrize(
    ("made", "load_format"), [(bucket, "flattened_bucket"), (pickled, None)]
)
def test_a_name_that_comes_twice_in_one_entry_is_refused(made, load_format):
    with spooled([made(["a", "b"])], load_format, allow_pickle=True) as (name,):
        assert load_file(SHARED_MEMORY / name).keys() == {"a", "b"}
    with (
        pytest.raises(Malformed, match=r"\[0\]: 'model\.a' comes twice"),
        spooled([made(["model.a", "b", "model.a"])], load_format, allow_pickle=True),
    ):
        pass


def storage_of_a_gpu() -> bytes:
    """Of two numbers, as a trainer pickles it that holds them there."""
    storage = torch.storage.TypedStorage(
        wrap_storage=torch.ones(2).untyped_storage(),
        dtype=torch.float32,
        _internal=True,
    )
    data = io.BytesIO()
    torch.save(storage, data, _use_new_zipfile_serialization=False)
    here, there = (
        b"X" + len(place).to_bytes(4, "little") + place for place in (b"cpu", b"cuda:0")
    )
    assert here in data.getvalue()
    return data.getvalue().replace(here, there)


class Reduced:
    """Pickled as a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        function, *arguments = self.call
        return function, tuple(arguments)


def test_pickled_tensors_of_a_gpu_are_read_on_the_cpu():
    storage = Reduced(torch.storage._load_from_bytes, storage_of_a_gpu())
    facts = (storage, 0, (2,), (1,), False, OrderedDict())
    pairs = [("a", Reduced(torch._utils._rebuild_tensor_v2, *facts))]
    entry = base64.b64encode(pickle.dumps(pairs)).decode()
    with spooled([entry], None, allow_pickle=True) as (name,):
        assert load_file(SHARED_MEMORY / name)["a"].tolist() == [1.0, 1.0]


def test_a_tensor_larger_than_the_bytes_that_came_with_it_is_refused():
    storage = Reduced(torch.storage._load_from_bytes, storage_of_a_gpu())
    facts = (storage, 0, (64,), (1,), False, OrderedDict())
    data = pickle.dumps([("a", Reduced(torch._utils._rebuild_tensor_v2, *facts))])
    with (
        pytest.raises(Malformed, match=r"cannot be read: .*not resizable"),
        spooled([base64.b64encode(data).decode()], None, allow_pickle=True),
    ):
        pass


def test_without_room_the_reason_is_told_and_nothing_stays(prefix, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(room, "_decode", full)
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


def said(entry: object) -> list[float]:
    with spooled([entry], None, allow_pickle=False) as (name,):
        tensor: torch.Tensor = load_file(SHARED_MEMORY / name)["a"]
        return tensor.tolist()


def test_a_text_that_was_left_in_its_body_is_read_piece_by_piece(monkeypatch):
    monkeypatch.setattr(room, "PIECE_BYTES", 7)  # which cuts groups of four
    raw = f'{{"x": "{ENTRY}"}}'.encode()
    start = raw.index(ENTRY.encode())
    assert said(room.LongText(raw, start, start + len(ENTRY))) == [1.0, 1.0]
    assert said(ENTRY) == [1.0, 1.0]


@pytest.mark.parametrize(
    "spoilt", [f"{ENTRY[:-1]}", f"{ENTRY}=", f"QQ=={ENTRY}", "not base64!", "\\q", 3]
)
def test_what_is_not_base64_is_refused_however_it_comes(monkeypatch, spoilt):
    monkeypatch.setattr(room, "PIECE_BYTES", 8)
    entries = [spoilt]
    if isinstance(spoilt, str):
        entries.append(room.LongText(spoilt.encode(), 0, len(spoilt)))
    for entry in entries:
        with pytest.raises(Malformed, match=r"\[0\] is not base64"):
            said(entry)
