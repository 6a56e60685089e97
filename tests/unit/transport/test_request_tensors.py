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
from vllm.inflight.transport.files.receiver_engine import SHARED_MEMORY
from vllm.inflight.transport.sglang import request_tensors as room
from vllm.inflight.transport.sglang.request_tensors import RequestTensors, spooled

pytestmark = pytest.mark.seconds

ENTRY = base64.b64encode(save({"a": torch.ones(2)})).decode()
KILLED = """if True:
    import os, signal, sys
    from vllm.inflight.transport.sglang import request_tensors as room
    room.PREFIX = sys.argv[1]
    with room.spooled([sys.argv[2]], None, allow_pickle=False) as tensors:
        print(tensors.infos[0]["shm"], flush=True)
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
    with spooled([ENTRY, ENTRY], None, allow_pickle=False) as tensors:
        assert tensors.names == {"a"}
        files = [load_file(SHARED_MEMORY / info["shm"]) for info in tensors.infos]
        return [{n: t.tolist() for n, t in file.items()} for file in files]


def file_of(tensors: RequestTensors) -> Path:
    """The only file of a request."""
    (info,) = tensors.infos
    return SHARED_MEMORY / info["shm"]


def test_the_files_of_a_request_exist_until_they_have_been_read(prefix):
    assert spool() == [{"a": [1.0, 1.0]}] * 2
    assert left(prefix) == []


def bucket(names: list[str]) -> str:
    parts = [
        {"name": name, "shape": [1], "dtype": "uint8", "start_idx": i, "end_idx": i + 1}
        for i, name in enumerate(names)
    ]
    whole = {"flattened_tensor": torch.arange(len(names), dtype=torch.uint8)}
    return base64.b64encode(save(whole, {"metadata": json.dumps(parts)})).decode()


def flat(whole: torch.Tensor, parts: str) -> str:
    data = save({"flattened_tensor": whole}, {"metadata": parts})
    return base64.b64encode(data).decode()


ROW = {"name": "a", "shape": [4], "dtype": "uint8", "start_idx": 0, "end_idx": 1}


@pytest.mark.parametrize(
    ("whole", "parts", "told"),
    [
        (torch.zeros(1, 4, dtype=torch.uint8), json.dumps([ROW]), "one dimension"),
        (torch.zeros((), dtype=torch.uint8), json.dumps([ROW]), "one dimension"),
        (torch.zeros(4, dtype=torch.uint8), "[" * 100_000, "not a whole"),
    ],
    ids=["rows", "a number", "deep"],
)
def test_a_bucket_is_a_row_of_bytes(prefix, whole, parts, told):
    with (
        pytest.raises(Malformed, match=told),
        spooled([flat(whole, parts)], "flattened_bucket", allow_pickle=False),
    ):
        pass
    assert left(prefix) == []


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
    with spooled([entry], None, allow_pickle=False) as tensors:
        assert load_file(file_of(tensors))["a"].tolist() == [1, 2, ord(".")]


@pytest.mark.parametrize(
    ("made", "load_format"), [(bucket, "flattened_bucket"), (pickled, None)]
)
def test_a_name_that_comes_twice_in_one_entry_is_rejected(made, load_format):
    with spooled([made(["a", "b"])], load_format, allow_pickle=True) as tensors:
        assert load_file(file_of(tensors)).keys() == {"a", "b"}
    with (
        pytest.raises(Malformed, match=r"\[0\]: 'model\.a' comes twice"),
        spooled([made(["model.a", "b", "model.a"])], load_format, allow_pickle=True),
    ):
        pass


@pytest.mark.parametrize(
    ("payload", "load_format"),
    [
        ([("a", torch.ones(2))], "flattened_bucket"),
        ({"flattened_tensor": torch.ones(2), "metadata": []}, None),
    ],
    ids=["a list", "a bucket"],
)
def test_a_pickle_of_the_other_format_is_rejected(payload, load_format):
    entry = base64.b64encode(pickle.dumps(payload)).decode()
    with (
        pytest.raises(Malformed, match="and load_format is"),
        spooled([entry], load_format, allow_pickle=True),
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
    with spooled([entry], None, allow_pickle=True) as tensors:
        assert load_file(file_of(tensors))["a"].tolist() == [1.0, 1.0]


class Changed(Reduced):
    """Pickled as a call, whose result is handed a state."""

    def __init__(self, state, *call):
        super().__init__(*call)
        self.state = state

    def __reduce__(self):
        return *super().__reduce__(), self.state


class FlattenedTensorMetadata:
    """SGLang's record of a part, with attributes of anybody's."""

    __module__ = "sglang.srt.weights"

    def __init__(self, **facts):
        vars(self).update(facts)


def storage() -> Reduced:
    """Of two numbers."""
    return Reduced(torch.storage._load_from_bytes, storage_of_a_gpu())


def tensor(source: object, *place: object) -> Reduced:
    """A call that rebuilds a tensor; `place`: offset, shape, strides."""
    facts = place or (0, (2,), (1,))
    call = source, *facts, False, OrderedDict()
    return Reduced(torch._utils._rebuild_tensor_v2, *call)


def parameter(data: object) -> Reduced:
    return Reduced(torch._utils._rebuild_parameter, data, False, OrderedDict())


def zipped() -> bytes:
    """A storage in the file format that torch writes today."""
    data = io.BytesIO()
    torch.save(torch.ones(2).untyped_storage(), data)
    return data.getvalue()


GROWING = {
    "beyond its storage": lambda: tensor(storage(), 0, (64,), (1,)),
    "its strides": lambda: tensor(storage(), 0, (2,), (2,)),
    "its offset": lambda: tensor(storage(), 1, (2,), (1,)),
    "an offset below 0": lambda: tensor(storage(), -1, (2,), (1,)),
    "a stride below 0": lambda: tensor(storage(), 1, (2,), (-1,)),
    "a size below 0": lambda: tensor(storage(), 0, (-2,), (1,)),
    "a size above 64 bits": lambda: tensor(storage(), 0, (1 << 64,), (0,)),
    "a size that is no count": lambda: tensor(storage(), 0, (True, 2), (1, 1)),
    "fewer strides": lambda: tensor(storage(), 0, (2, 64), (1,)),
    "a parameter of nothing": lambda: parameter(None),
    "a tensor on that": lambda: tensor(parameter(None), 0, (64,), (1,)),
    "a tensor on a tensor": lambda: tensor(tensor(storage()), 0, (64,), (1,)),
    "a record for a storage": lambda: tensor(
        FlattenedTensorMetadata(dtype=torch.uint8, _untyped_storage=tensor(storage())),
        *(0, (64,), (1,)),
    ),
    "a record that holds a parameter of nothing": lambda: tensor(
        FlattenedTensorMetadata(dtype=torch.uint8, _untyped_storage=parameter(None)),
        *(0, (512,), (1,)),
    ),
    "a storage that is changed": lambda: tensor(
        Changed(
            {"dtype": torch.float64},
            torch.storage._load_from_bytes,
            storage_of_a_gpu(),
        )
    ),
    "a tensor that is set anew": lambda: Changed(
        (tensor(storage()), 0, (64,), (1,)),
        torch._utils._rebuild_tensor_v2,
        *(storage(), 0, (2,), (1,), False, OrderedDict()),
    ),
    "bytes of another format": lambda: tensor(
        Reduced(torch.storage._load_from_bytes, zipped())
    ),
    "bytes that are none": lambda: tensor(Reduced(torch.storage._load_from_bytes, 8)),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_pickle_makes_no_tensor_beyond_the_bytes_that_came_with_it(name, monkeypatch):
    for module in ("sglang", "sglang.srt", FlattenedTensorMetadata.__module__):
        monkeypatch.setitem(sys.modules, module, sys.modules[__name__])
    made = GROWING[name]()
    entry = base64.b64encode(pickle.dumps([("a", made)])).decode()
    with (
        pytest.raises(Malformed, match=r"\[0\]: (a|the) "),
        spooled([entry], None, allow_pickle=True),
    ):
        pass


def test_tensors_that_torch_pickled_are_read_unchanged():
    whole = torch.arange(12.0).reshape(3, 4)
    made = {
        "whole": whole,
        "turned": whole.t(),
        "cut": whole[1:, 1:3],
        "spread": torch.ones(1).expand(2, 2),
        "one": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(whole + 1),
    }
    entry = base64.b64encode(pickle.dumps(list(made.items()))).decode()
    with spooled([entry], None, allow_pickle=True) as tensors:
        found = load_file(file_of(tensors))
    assert found.keys() == made.keys()
    for each, tensor_ in made.items():
        assert torch.equal(found[each], tensor_.detach()), each


def test_full_shared_memory_is_reported_and_leaves_no_files(prefix, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(room, "_decode", full)
    with pytest.raises(EngineFault, match="no space left"):
        spool()
    assert left(prefix) == []


def test_files_of_a_killed_server_are_removed_and_of_a_living_one_are_not(
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
    with spooled([entry], None, allow_pickle=False) as tensors:
        tensor: torch.Tensor = load_file(file_of(tensors))["a"]
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
def test_invalid_base64_is_rejected_in_every_form(monkeypatch, spoilt):
    monkeypatch.setattr(room, "PIECE_BYTES", 8)
    entries = [spoilt]
    if isinstance(spoilt, str):
        entries.append(room.LongText(spoilt.encode(), 0, len(spoilt)))
    for entry in entries:
        with pytest.raises(Malformed, match=r"\[0\] is not base64"):
            said(entry)
