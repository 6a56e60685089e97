"""Parcels: one safetensors file, whole or not there, and gone when it was used."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.ops.test_ops import freed
from tests.unit.trainer.conftest import parcels
from vllm.inflight import ops
from vllm.inflight.errors import ConfigError, Malformed
from vllm.inflight.trainer import Publisher
from vllm.inflight.trainer import snapshot as room
from vllm.inflight.trainer.snapshot import DTYPES, SHARED_MEMORY, Snapshot, sweep
from vllm.inflight.transport.waiting import in_background

pytestmark = pytest.mark.seconds


def mixed() -> dict[str, torch.Tensor]:
    """Every dtype, sizes that leave nothing aligned, a scalar, an empty tensor."""
    found = {
        f"{position}.{code}": torch.arange(position + 1).to(dtype)
        for position, (dtype, code) in enumerate(DTYPES.items())
    }
    return found | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "large": torch.arange(64.0 * 64).reshape(64, 64),
        "negative": torch.ones(4, dtype=torch.cfloat).conj().imag,
    }


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[name].dtype
        and x.shape == b[name].shape
        and ops.digest([x.clone()]) == ops.digest([b[name].clone()])
        for name, x in a.items()
    )


def test_the_file_holds_every_tensor_whatever_its_dtype_and_size(tmp_path):
    parcel = Snapshot.pack(mixed().items(), tmp_path)
    assert equal(load_file(parcel.file), mixed())
    assert parcel.update_info == {"path": str(parcel.file)}
    assert parcel.num_bytes == sum(tensor.nbytes for tensor in mixed().values())


def test_a_header_longer_than_its_place_moves_the_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "HEADER_BYTES", 64)
    monkeypatch.setattr(room, "BLOCK_BYTES", 1000)
    parcel = Snapshot.pack(mixed().items(), tmp_path)
    assert equal(load_file(parcel.file), mixed())


def test_a_snapshot_in_shared_memory_is_announced_by_its_file_name():
    parcel = Snapshot.pack([("a", torch.ones(3))])
    assert parcel.update_info == {"shm": parcel.file.name}
    assert parcel.file.parent == SHARED_MEMORY
    parcel.remove()
    parcel.remove()
    assert not parcel.file.exists()


def test_a_stream_may_use_its_memory_again_for_the_next_tensor(tmp_path):
    def stream():
        memory = torch.empty(3, dtype=torch.bfloat16)  # an odd size is kept back
        for value in range(3):
            yield str(value), memory.fill_(value)

    parcel = Snapshot.pack(stream(), tmp_path)
    found = load_file(parcel.file)
    assert [int(found[str(value)][0]) for value in range(3)] == [0, 1, 2]


def test_the_manifest_tells_shape_dtype_and_digest_of_every_tensor(tmp_path):
    source = {"a": torch.randn(2, 3, dtype=torch.bfloat16), "b": torch.arange(5)}
    manifest = Snapshot.pack(source.items(), tmp_path).manifest(step=7)
    assert manifest.step == 7
    told = {n: (s.shape, s.dtype, s.digest) for n, s in manifest.tensors.items()}
    digests = [digest.hex() for digest in ops.digest(list(source.values()))]
    assert told == {
        "a": ((2, 3), "bfloat16", digests[0]),
        "b": ((5,), "int64", digests[1]),
    }


def test_a_manifest_made_without_digests_has_none(tmp_path):
    manifest = Snapshot.pack([("a", torch.ones(2))], tmp_path).manifest(digests=False)
    assert manifest.tensors["a"].digest is None


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "called 'a'"),
        ([("a", torch.ones(2, dtype=torch.cfloat))], "'a' has dtype torch.complex64"),
        ([("a", torch.ones(2, device="meta"))], "'a' is a meta tensor"),
        ([("a", torch.ones(2, 2).to_sparse())], "'a' is a torch.sparse_coo tensor"),
        ([("a", freed(torch.ones(2)))], "'a' has no memory of its own; gather it"),
    ],
)
def test_a_tensor_that_cannot_be_sent_is_named_and_leaves_no_file(
    tmp_path, pairs, named
):
    with pytest.raises(Malformed, match=named):
        Snapshot.pack(pairs, tmp_path)
    assert parcels(tmp_path) == set()


def test_a_source_that_fails_leaves_no_file(tmp_path):
    def stream():
        yield "a", torch.ones(1000)
        raise RuntimeError("the gather failed")

    with pytest.raises(RuntimeError, match="the gather failed"):
        Snapshot.pack(stream(), tmp_path)
    assert parcels(tmp_path) == set()


def test_the_error_about_full_shared_memory_names_the_remedy(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(room, "_write_all", full)
    with pytest.raises(OSError, match="--shm-size"):
        Snapshot.pack([("a", torch.ones(2))], tmp_path)
    assert parcels(tmp_path) == set()


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="elsewhere"):
        Snapshot.pack([], tmp_path / "elsewhere")


def test_a_parcel_that_nobody_holds_is_removed(tmp_path):
    parcel = Snapshot.pack([("a", torch.ones(2))], tmp_path)
    del parcel
    gc.collect()
    assert parcels(tmp_path) == set()


SCRIPT = """if True:
    import os, signal, sys, torch
    from pathlib import Path
    import _vllm_inflight_boot as boot
    boot._defer_upstream()  # nothing of it is used, and it takes seconds to import
    from vllm.inflight.trainer import snapshot as room
    from vllm.inflight.trainer.snapshot import Snapshot
    room.PREFIX = sys.argv[2]
    directory = Path(sys.argv[3]) if sys.argv[3:] else None
    parcel = Snapshot.pack([("a", torch.ones(2))], directory)
    child = os.fork()
    if not child:
        sys.exit()
    os.waitpid(child, 0)
    assert parcel.file.exists(), "a forked child has taken it away"
    print(parcel.file)
    sys.stdout.flush()
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def left_by(end: str, *directory: str) -> Path:
    """What remains of a parcel of a trainer that ended so."""
    arguments = [end, room.PREFIX, *directory]
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return Path(done.stdout.split()[-1])


def test_a_trainer_that_ends_takes_its_parcel_with_it():
    assert not left_by("exit").exists()


def test_the_parcel_of_a_killed_trainer_is_swept_and_that_of_a_living_one_is_not():
    left = left_by("kill")
    assert left.exists()
    alive = Snapshot.pack([("a", torch.ones(2))])
    sweep()
    assert left.exists(), "it may be one that was begun this very moment"
    ages_ago = time.time() - 2 * room.LEFT_AFTER_S
    for file in (left, alive.file):
        os.utime(file, (ages_ago, ages_ago))
    sweep()
    assert not left.exists()
    assert alive.file.exists()
    alive.remove()


def test_only_this_hosts_leftover_snapshots_are_removed_from_a_shared_directory(
    tmp_path,
):
    left = left_by("kill", str(tmp_path))
    alive = Snapshot.pack([("a", torch.ones(2))], tmp_path)
    elsewhere = tmp_path / f"{room.PREFIX}{'0' * 12}-abc.safetensors"
    elsewhere.touch()
    ages_ago = time.time() - 2 * room.LEFT_AFTER_S
    for file in (left, alive.file, elsewhere):
        os.utime(file, (ages_ago, ages_ago))
    with Publisher("http://nobody", {}, wire="disk", directory=tmp_path):
        assert parcels(tmp_path) == {alive.file, elsewhere}


def test_the_sweep_of_leftover_snapshots_does_not_wait_for_a_pipe():
    pipe = SHARED_MEMORY / f"{room.PREFIX}pipe-{os.getpid()}"
    os.mkfifo(pipe)
    try:
        in_background(sweep).result(timeout=60)
    finally:
        with suppress(FileNotFoundError):
            pipe.unlink()


@pytest.mark.parametrize("room_bytes", [64, 1 << 20])
def test_tensors_of_a_parcel_are_given_other_names(monkeypatch, room_bytes):
    monkeypatch.setattr(room, "HEADER_BYTES", room_bytes)
    pairs = [(f"t{n}", torch.full((3, n + 1), float(n))) for n in range(20)]
    parcel = Snapshot.pack(pairs)
    try:
        told = [(n, list(t.shape), "float32") for n, t in pairs]
        assert sorted(parcel.specs) == sorted(told)
        parcel.rename({"t3": "a.much.longer.name" * 20, "absent": "x"})
        found = load_file(parcel.file)
        assert found.keys() == {n for n, _ in pairs} - {"t3"} | {
            "a.much.longer.name" * 20
        }
        assert torch.equal(found["a.much.longer.name" * 20], pairs[3][1])
        with pytest.raises(Malformed, match="two tensors of the source are called"):
            parcel.rename({"t1": "t2"})
        assert load_file(parcel.file).keys() == found.keys()
    finally:
        parcel.remove()
