"""Files that are opened: what they have is announced, or they are malformed."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.broken_files import BROKEN, F32, header
from tests.wire.checkpoints import everything, written
from tests.wire.peers import digests, open_things, process
from vllm.inflight.errors import Malformed
from vllm.inflight.wire import local, tensor_files
from vllm.inflight.wire.local import read_files
from vllm.inflight.wire.tensor_files import DTYPES, Stored, TensorFiles


def test_tensors_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    files = written(tmp_path, everything())
    with TensorFiles(files, lambda name: f"draft.{name}") as opened:
        announced = opened.announced
        told = zip(announced.names, announced.dtypes, announced.shapes, strict=True)
        expected = [
            (f"draft.{n}", t.dtype, tuple(t.shape))
            for file in files
            for n, t in load_file(file).items()
        ]
        assert sorted(told, key=str) == sorted(expected, key=str)


def test_read_tensor_by_tensor_they_are_what_was_written(tmp_path: Path) -> None:
    named = everything()
    before = open_things()
    found = dict(read_files(written(tmp_path, named)))
    assert digests(found.items()) == digests(named.items())
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in named.items()
    }
    assert open_things() == before


def test_read_tensor_by_tensor_they_take_the_memory_of_two(tmp_path: Path) -> None:
    """New memory for each would be a fault for each of its pages."""
    named = {f"t{n}": torch.full((1000 - n,), float(n)) for n in range(9)}
    pairs = ((name, tensor) for name, tensor in read_files(written(tmp_path, named, 1)))
    places, kept = set(), []
    for name, tensor in pairs:
        assert torch.equal(tensor, named[name])
        places.add(tensor.data_ptr())
        if name == "t4":
            kept.append((name, tensor))
    assert len(places) == 3  # and one more, for that which is kept
    assert all(torch.equal(tensor, named[name]) for name, tensor in kept)


def test_large_tensors_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RUN_BYTES", 1 << 10)
    large, small = torch.arange(1 << 10), torch.arange(1 << 7)
    files = written(tmp_path, {"large": large, "small": small}, 1)
    threads: list[threading.Thread] = []
    read, two = Stored.read, threading.Barrier(2, timeout=60)

    def meet(self: Stored, start: int, into: memoryview) -> None:
        threads.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            two.wait()
        read(self, start, into)

    before = open_things()
    with monkeypatch.context() as patched:
        patched.setattr(Stored, "read", meet)
        found = dict(read_files(files, 4))
    assert torch.equal(found["large"], large)
    assert torch.equal(found["small"], small)
    assert len(threads) == 8 + 1
    assert threads.count(threading.main_thread()) == 1  # what is small is not shared
    os.truncate(files[0], files[0].stat().st_size // 2)
    with pytest.raises(Malformed):
        list(read_files(files, 4))
    assert open_things() == before


def test_one_thread_reads_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging beside decoding on a CPU rests by what its own thread has used."""
    monkeypatch.setattr(local, "RUN_BYTES", 1 << 10)
    (file,) = written(tmp_path, {"large": (large := torch.arange(1 << 10))}, 1)
    before = set(threading.enumerate())
    for _, tensor in read_files([file]):
        assert set(threading.enumerate()) <= before  # others may end meanwhile
        assert torch.equal(tensor, large)


def shortening(pipe: Any, folder: Path) -> None:
    """Read a file that is written anew in the middle of it; tell what comes of it."""
    (file,) = written(folder, {"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)}, 1)
    try:
        for name, tensor in read_files([file]):
            pipe.send(f"{name} {tensor.sum().item():g}")
            os.truncate(file, 1000)
    except Malformed as error:
        pipe.send(error.message)


def test_a_file_that_is_written_anew_while_it_is_read_ends_no_process(
    tmp_path: Path,
) -> None:
    with process(shortening, tmp_path) as reader:
        assert reader.pipe.recv() == "a 65536"
        assert "it ends at" in reader.pipe.recv()


def test_tensors_are_announced_as_they_lie_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "backwards.safetensors"
    entries = {"a": F32 | {"data_offsets": [8, 16]}, "b": F32}
    file.write_bytes(header(entries, bytes(16)))
    with TensorFiles([file]) as opened:
        assert opened.announced.names == ("b", "a")


def test_to_open_files_touches_no_tensor_in_them() -> None:
    """A page that is touched is there afterwards; it had to come from the disk."""
    num_bytes = 4 * (size := 1 << 20)
    offsets = [[at, at + size] for at in range(0, num_bytes, size)]
    f32 = F32 | {"shape": [size // 4]}
    entries = {f"t{n}": f32 | {"data_offsets": o} for n, o in enumerate(offsets)}
    with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".safetensors") as file:
        file.write(header(entries))
        file.flush()
        file.truncate(file.tell() + num_bytes)  # in memory it has no page yet
        before = os.fstat(file.fileno()).st_blocks
        with TensorFiles([Path(file.name)]) as opened:
            assert len(opened.stored) == 4
        assert os.fstat(file.fileno()).st_blocks == before


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_and_shapes_are_those_that_safetensors_reads(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / "one.safetensors"
    num_bytes = 6 * DTYPES[name].itemsize // (2 if name == "F4" else 1)
    entry = {"dtype": name, "shape": [3, 2], "data_offsets": [0, num_bytes]}
    file.write_bytes(header({"a": entry}, bytes(num_bytes)))
    with safe_open(file, framework="pt") as reader:
        expected = reader.get_tensor("a")
    with TensorFiles([file]) as opened:
        assert opened.announced.dtypes == (expected.dtype,)
        assert opened.announced.shapes == (tuple(expected.shape),)


def test_a_dtype_that_torch_lacks_is_named(tmp_path: Path) -> None:
    file = tmp_path / "six.safetensors"
    entry = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    file.write_bytes(header({"a": entry}, bytes(3)))
    with pytest.raises(Malformed, match=r"six\.safetensors .*'a' has .*lacks, F6_E2M3"):
        TensorFiles([file])


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_lies_about_itself_is_malformed_by_name(
    tmp_path: Path, data: bytes
) -> None:
    file = tmp_path / "broken.safetensors"
    file.write_bytes(data)
    before = open_things()
    with pytest.raises(Malformed, match=r"broken\.safetensors is not a whole"):
        TensorFiles([*written(tmp_path, {"a": torch.ones(2)}), file])
    assert open_things() == before


OTHERS = {
    "cut": lambda data: data[:20],
    "nothing": lambda data: b"",
    "not JSON": lambda data: data[:8] + b"?" * (len(data) - 8),
    "no object": lambda data: data[:8] + b"[]".ljust(len(data) - 8),
    "no such tensor": lambda data: data.replace(b'"a"', b'"b"'),
    "past the end": lambda data: data.replace(b"[0,8]", b"[1,9]"),
    "elsewhere": lambda data: data.replace(b"[0,", b"[9,"),
    "no offsets": lambda data: data.replace(b"data_offsets", b"data_offsetz"),
    "no number": lambda data: data.replace(b"[0,", b'["",'),
    "another size": lambda data: data.replace(b"[0,", b"[4,"),
}


def before_safetensors(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[], Any]
) -> None:
    """A change when the file is open, and before safetensors judges it."""
    real = tensor_files.safe_open

    def opened(*args: Any, **kwargs: Any) -> Any:
        change()
        return real(*args, **kwargs)

    monkeypatch.setattr(tensor_files, "safe_open", opened)


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_a_file_that_changes_while_it_is_opened_is_malformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
) -> None:
    (file,) = written(tmp_path, {"a": torch.ones(2)}, 1)
    changed = change(file.read_bytes())
    before_safetensors(monkeypatch, lambda: file.write_bytes(changed))
    with pytest.raises(Malformed, match=r"0\.safetensors is not a whole"):
        TensorFiles([file])


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes as what it has them for: the other one has as many, of another kind."""
    named = {"a": torch.full((8,), 1.5, dtype=torch.bfloat16)}
    (file,) = written(tmp_path, named, 1)
    (tmp_path / "other").mkdir()
    (other,) = written(tmp_path / "other", {"a": named["a"].half()}, 1)
    before_safetensors(monkeypatch, lambda: other.replace(file))
    found = dict(read_files([file]))
    assert digests(found.items()) == digests(named.items())
    assert found["a"].dtype == torch.bfloat16


def test_a_file_that_is_written_to_while_it_is_read_is_malformed(
    tmp_path: Path,
) -> None:
    """As by a trainer that saves its next version over the last one."""
    (file,) = written(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4)}, 1)
    os.utime(file, (0, 0))  # clocks of file systems tick slowly
    before = open_things()
    reading = read_files([file])
    next(reading)
    with file.open("r+b") as opened:
        opened.seek(-16, os.SEEK_END)
        opened.write(torch.ones(4).numpy().tobytes())
    with pytest.raises(Malformed, match=r"0\.safetensors .* written to while"):
        list(reading)
    assert open_things() == before
