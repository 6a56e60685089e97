"""Files that are opened: what they have is announced, or they are malformed."""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tests.robustness.fuzz import mutation
from tests.support.broken_files import BROKEN, F32, header
from tests.support.transports.checkpoints import everything, written
from tests.support.transports.peers import digests, open_things, process
from vllm.inflight.errors import Malformed
from vllm.inflight.transport.files import receiver_engine, safetensors_files
from vllm.inflight.transport.files.receiver_engine import checkpoint_files, read_files
from vllm.inflight.transport.files.safetensors_files import DTYPES, Stored, TensorFiles

pytestmark = pytest.mark.seconds


def test_tensors_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    files = written(tmp_path, everything())
    with TensorFiles(files, lambda name: f"draft.{name}") as opened:
        announced = opened.tensor_list
        told = zip(announced.names, announced.dtypes, announced.shapes, strict=True)
        expected = [
            (f"draft.{n}", t.dtype, tuple(t.shape))
            for file in files
            for n, t in load_file(file).items()
        ]
        assert sorted(told, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    "name, found, remedy",
    [
        ("adapter_model.safetensors", "holds an adapter", "/v1/load_lora_adapter"),
        ("pytorch_model.bin", "holds no .safetensors file", "save_pretrained"),
    ],
)
def test_a_folder_without_a_model_is_told_for_what_it_is(
    tmp_path: Path, name: str, found: str, remedy: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(Malformed, match=found) as refused:
        checkpoint_files(tmp_path)
    assert remedy in refused.value.remedy


def test_tensors_read_one_by_one_equal_the_written_tensors(tmp_path: Path) -> None:
    named = everything()
    before = open_things()
    found = dict(read_files(written(tmp_path, named)))
    assert digests(found.items()) == digests(named.items())
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in named.items()
    }
    assert open_things() <= before


def test_tensors_read_one_by_one_use_two_buffers(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("filling", "is_looked_at", "is_valid"),
    [(b" " * 5000, False, True), (b"\n" + b" " * 9, True, True), (b" x ", True, False)],
)
def test_spaces_that_fill_a_header_up_are_not_looked_at(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    filling: bytes,
    is_looked_at: bool,
    is_valid: bool,
) -> None:
    texts: list[str] = []
    real = safetensors_files._pairs

    def noted(text: str) -> Any:
        texts.append(text)
        return real(text)

    monkeypatch.setattr(safetensors_files, "_pairs", noted)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"t": entry}).encode()
    file = tmp_path / "filled.safetensors"
    size = struct.pack("<Q", len(text) + len(filling))
    file.write_bytes(size + text + filling + struct.pack("<ff", 1.0, 2.0))
    if is_valid:
        ((_, tensor),) = read_files([file])
        assert tensor.tolist() == [1.0, 2.0]
    else:
        with pytest.raises(Malformed):
            list(read_files([file]))
    assert texts == [(text + filling * is_looked_at).decode()]


def test_large_tensors_are_read_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_engine, "RUN_BYTES", 1 << 10)
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
    assert open_things() <= before


def test_one_by_one_reads_start_no_other_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staging beside decoding on a CPU rests by what its own thread has used."""
    monkeypatch.setattr(receiver_engine, "RUN_BYTES", 1 << 10)
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


def test_a_file_that_is_shortened_during_a_read_ends_no_process(
    tmp_path: Path,
) -> None:
    with process(shortening, tmp_path) as reader:
        assert reader.pipe.recv() == "a 65536"
        assert "it ends at" in reader.pipe.recv()


def test_tensors_are_announced_in_the_order_of_their_file(tmp_path: Path) -> None:
    file = tmp_path / "backwards.safetensors"
    entries = {"a": F32 | {"data_offsets": [8, 16]}, "b": F32}
    file.write_bytes(header(entries, bytes(16)))
    with TensorFiles([file]) as opened:
        assert opened.tensor_list.names == ("b", "a")


def test_opening_a_file_reads_no_tensor_data() -> None:
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
        assert opened.tensor_list.dtypes == (expected.dtype,)
        assert opened.tensor_list.shapes == (tuple(expected.shape),)


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
    assert open_things() <= before


OTHERS = {
    "cut": lambda data: data[:20],
    "nothing": lambda data: b"",
    "not JSON": lambda data: data[:8] + b"?" * (len(data) - 8),
    "no object": lambda data: data[:8] + b"[]".ljust(len(data) - 8),
    "past the end": lambda data: data.replace(b"[0,8]", b"[1,9]"),
    "elsewhere": lambda data: data.replace(b"[0,", b"[9,"),
    "no offsets": lambda data: data.replace(b"data_offsets", b"data_offsetz"),
    "no number": lambda data: data.replace(b"[0,", b'["",'),
    "another size": lambda data: data.replace(b"[0,", b"[4,"),
    "one byte more": lambda data: data + b"0",
    "a colon less": lambda data: data.replace(b'"a":', b'"a" '),
    "a name that is a number": lambda data: data.replace(b'"a":', b"123:"),
    "a comma more": lambda data: data.replace(b"}}", b"},").replace(b"  ", b"} "),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_a_file_that_is_nearly_whole_is_malformed(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    (file,) = written(tmp_path, {"a": torch.ones(2)}, 1)
    whole = file.read_bytes()
    file.write_bytes(change(whole))
    assert file.read_bytes() != whole
    with pytest.raises(Malformed, match=r"0\.safetensors is not a whole"):
        TensorFiles([file])


def judged(file: Path) -> Any:
    """What safetensors itself says of a file: its tensors, or None."""
    try:
        with safe_open(file, framework="pt") as opened:
            found = {}
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                told = opened.get_slice(name)
                found[name] = DTYPES[told.get_dtype()], tuple(told.get_shape())
            return found
    except (SafetensorError, KeyError):
        return None


SEEDS = [
    header({"a": F32, "b": F32 | {"data_offsets": [8, 16]}}, bytes(16)),
    header({"b": F32 | {"data_offsets": [8, 16]}, "a": F32}, bytes(16)),
    header({"a": F32 | {"shape": [0, 3], "data_offsets": [0, 0]}, "b": F32}, bytes(8)),
    header({"a": F32, "b": F32 | {"shape": [0], "data_offsets": [8, 8]}}, bytes(8)),
    header({"__metadata__": {"format": "pt"}, "a": F32 | {"shape": [2, 1]}}, bytes(8)),
    header({"é\n": F32 | {"dtype": "F64", "shape": []}}, bytes(8)),
    header({}),
]


def test_a_file_is_accepted_only_if_safetensors_accepts_it(
    tmp_path: Path,
) -> None:
    """Whole ones and such as have one to four things changed."""
    file = tmp_path / "judged.safetensors"
    rng = random.Random(26)
    num_accepted = 0
    for number in range(4000):
        data = rng.choice(SEEDS)
        if number >= len(SEEDS):
            data = mutation.octets(rng, data) if number % 4 else varied(rng, data)
        file.write_bytes(data)
        expected = judged(file)
        try:
            with TensorFiles([file]) as opened:
                told = opened.tensor_list
                found = dict(
                    zip(
                        told.names,
                        zip(told.dtypes, told.shapes, strict=True),
                        strict=True,
                    )
                )
        except Malformed as error:
            assert expected is None or "twice" in error.message, data
            continue
        assert found == expected, data
        num_accepted += 1
    assert num_accepted > 50


def varied(rng: random.Random, data: bytes) -> bytes:
    """The same header with a value changed, and its length as it is then."""
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    return header(mutation.value(rng, entries), data[8 + length :])


@pytest.mark.parametrize("length", [100_000_001, (1 << 31) - 8, 1 << 63])
def test_a_header_that_is_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A file of 2 GiB that takes a page on the disk; its header would be all of it."""
    file = tmp_path / "sparse.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{")
    os.truncate(file, 1 << 31)
    read: list[int] = []
    real = os.pread

    def pread(descriptor: int, count: int, at: int) -> bytes:
        read.append(count)
        return real(descriptor, count, at)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(Malformed, match="length of a header") as refusal:
        TensorFiles([file])
    assert read == [8]
    assert str(length) not in refusal.value.message


def test_an_error_does_not_reveal_the_first_bytes_of_a_file(tmp_path: Path) -> None:
    """It may be a file of anybody's that this process can read."""
    file = tmp_path / "secret"
    file.write_bytes(secret := b"s3cr3t-t0ken-of-somebody")
    number = int.from_bytes(secret[:8], "little")
    with pytest.raises(Malformed) as refusal:
        TensorFiles([file])
    told = refusal.value.message.replace(str(file), "")
    assert str(number) not in told and "s3cr" not in told


def test_no_large_part_of_a_header_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's lock is free between two parts, so that decoding goes on."""
    names = [f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in range(20_000)]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "many.safetensors")
    longest = 0

    class Watched(json.JSONDecoder):
        def raw_decode(self, text: str, idx: int = 0) -> Any:
            nonlocal longest
            value, end = super().raw_decode(text, idx)
            longest = max(longest, end - idx)
            return value, end

    with monkeypatch.context() as patched:
        patched.setattr(json, "JSONDecoder", Watched)
        patched.setattr(json, "loads", None)
        with TensorFiles([tmp_path / "many.safetensors"]) as opened:
            assert sorted(opened.tensor_list.names) == sorted(names)
            assert len(opened.stored) == len(names)
    assert 0 < longest < 200


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes as what it has them for: the other one has as many, of another kind."""
    named = {"a": torch.full((8,), 1.5, dtype=torch.bfloat16)}
    (file,) = written(tmp_path, named, 1)
    (tmp_path / "other").mkdir()
    (other,) = written(tmp_path / "other", {"a": named["a"].half()}, 1)
    real = os.open

    def opened(*args: Any) -> int:
        descriptor = real(*args)
        other.replace(file)
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    reading = read_files([file])
    found = dict([next(reading)])
    monkeypatch.undo()
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
    assert open_things() <= before


def test_a_write_that_restores_the_files_time_is_detected(tmp_path: Path) -> None:
    """As `rsync -t` and `cp -p` do, and tools that restore a file."""
    (file,) = written(tmp_path, {"a": torch.zeros(4), "b": torch.zeros(4)}, 1)
    told = file.stat()
    time.sleep(0.05)  # clocks of file systems tick slowly
    reading = read_files([file])
    next(reading)
    with file.open("r+b") as opened:
        opened.seek(-16, os.SEEK_END)
        opened.write(torch.ones(4).numpy().tobytes())
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
    assert file.stat().st_mtime_ns == told.st_mtime_ns
    with pytest.raises(Malformed, match=r"0\.safetensors .* written to while"):
        list(reading)
