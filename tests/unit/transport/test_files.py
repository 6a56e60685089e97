"""Files read by way of page-locked memory: byte by byte, and to a known end.

On host memory here, where nothing is page-locked; tests/gpu reads into a GPU's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.transports.checkpoints import Named, buckets, everything, written
from tests.support.transports.peers import (
    BUCKET_BYTES,
    CPU,
    PATIENT,
    Recorder,
    digests,
    open_things,
)
from tests.support.waiting import until
from vllm.inflight.errors import Cancelled, Malformed, TransferFault
from vllm.inflight.transport.buckets.reassembly import Destination
from vllm.inflight.transport.buckets.receiver import Incoming, Receiver
from vllm.inflight.transport.files import bucket_reader, receiver_engine
from vllm.inflight.transport.files.bucket_reader import FileReader
from vllm.inflight.transport.files.receiver_engine import LocalEngine
from vllm.inflight.transport.files.safetensors_files import TensorFiles
from vllm.inflight.transport.waiting import WaitLimit

pytestmark = pytest.mark.seconds


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> FileReader:
    """With small buckets, each read in many runs."""
    monkeypatch.setattr(bucket_reader, "RUN_BYTES", 512)
    return FileReader(CPU, BUCKET_BYTES)


@contextmanager
def incoming(
    reader: FileReader, files: list[Path], watch: WaitLimit = PATIENT
) -> Iterator[Incoming]:
    """What an engine would be handed of these files."""
    with TensorFiles(files) as opened:
        receiver = Receiver(reader, 3, watch)
        reader.begin(opened)
        try:
            yield receiver.tensors(opened.tensor_list, watch)
        finally:
            reader.close()


def received(reader: FileReader, files: list[Path]) -> Named:
    with incoming(reader, files) as pairs:
        return {name: tensor.clone() for name, tensor in pairs}


@pytest.mark.parametrize("num_files", [1, 4])
def test_every_byte_is_read(reader: FileReader, tmp_path: Path, num_files: int) -> None:
    named = everything()
    files = written(tmp_path, named, num_files)
    for _ in range(2):
        assert digests(received(reader, files).items()) == digests(named.items())


def test_large_tensors_are_read_into_their_places(tmp_path: Path) -> None:
    named = {"large": torch.randn(1 << 19), "small": torch.randn(5)}
    target = torch.zeros(1 << 19)
    home = Destination.of(target)
    reader = FileReader(CPU, 1 << 20)
    with incoming(reader, written(tmp_path, named)) as pairs:
        pairs.into(lambda name, *_: home if name == "large" else None)
        found = dict(pairs)
    assert found["large"] is home.tensor
    assert torch.equal(target, named["large"])
    assert torch.equal(found["small"], named["small"])


def test_a_file_cut_short_after_it_was_opened_is_malformed_by_name(
    reader: FileReader, tmp_path: Path
) -> None:
    before = open_things()
    files = written(tmp_path, everything())
    with (
        pytest.raises(Malformed, match=r"1\.safetensors is not a whole.*it ends at"),
        incoming(reader, files) as pairs,
    ):
        os.truncate(files[1], files[1].stat().st_size - 1)
        for _ in pairs:
            pass
    assert open_things() <= before
    # And the next transfer is as good as any.
    files = written(tmp_path, everything())
    assert digests(received(reader, files).items()) == digests(everything().items())


def test_a_file_that_cannot_be_read_is_malformed_by_name(
    reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    with (
        pytest.raises(Malformed, match=r"safetensors is not a whole.*Input/output"),
        incoming(reader, written(tmp_path, everything())) as pairs,
    ):
        monkeypatch.setattr(os, "preadv", fail)
        for _ in pairs:
            pass


def test_short_reads_are_continued(
    reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, into, at: real(fd, [into[0][:100]], at)
    )
    named = everything()
    files = written(tmp_path, named)
    assert digests(received(reader, files).items()) == digests(named.items())


def crawling(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let each read take its time; returns the reads as they begin."""
    real, reads = os.preadv, []

    def crawl(*args: Any) -> int:
        reads.append(args)
        time.sleep(0.1)
        return real(*args)

    monkeypatch.setattr(os, "preadv", crawl)
    return reads


class SlowReader(FileReader):
    """Is a while about its copies."""

    def _copy(self, targets: Any, sources: Any) -> Any:
        time.sleep(0.2)
        return super()._copy(targets, sources)


def test_an_aborted_read_leaves_nothing_open_and_the_next_read_works(
    tmp_path: Path,
) -> None:
    reader = SlowReader(CPU, BUCKET_BYTES)
    named = dict(list(buckets().items())[:5])
    files = written(tmp_path, named)
    before = open_things()
    with pytest.raises(Cancelled), incoming(reader, files) as pairs:
        next(pairs)
        assert not open_things() <= before
        raise Cancelled("enough")
    assert open_things() <= before
    assert digests(received(reader, files).items()) == digests(named.items())
    assert open_things() <= before


def is_shut(pool: Any) -> bool:
    """Whether it was shut down, and what waited in it thrown away."""
    with pool._shutdown_lock:
        return bool(pool._shutdown)


def test_a_cancelled_update_waits_only_for_reads_in_progress(
    reader: FileReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_reader, "RUN_BYTES", BUCKET_BYTES // 64)
    files = written(tmp_path, buckets())
    before = open_things()
    real, reads = os.preadv, []

    def waiting(*args: Any) -> int:
        """Is under way until the reader begins no more."""
        reads.append(args)
        until(lambda: reader._readers is None or is_shut(reader._readers))
        return real(*args)

    monkeypatch.setattr(os, "preadv", waiting)
    watch = WaitLimit(60.0, lambda: bool(reads))
    with pytest.raises(Cancelled), incoming(reader, files, watch) as pairs:
        list(pairs)
    assert len(reads) <= bucket_reader.NUM_THREADS
    assert open_things() <= before


@pytest.mark.parametrize("num_buckets", [3, 40], ids=["all begun", "some begun"])
def test_a_reader_ended_by_another_thread_returns_no_data(
    reader: FileReader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_buckets: int,
) -> None:
    """What lies in its buckets then is anything."""
    named = dict(list(buckets().items())[:num_buckets])
    crawling(monkeypatch)
    with (
        pytest.raises(TransferFault, match="shut down"),
        incoming(reader, written(tmp_path, named)) as pairs,
    ):
        for batch in pairs.batches():
            batch.clear()  # so that its bucket may be used again
            reader.abort("shut down")


class LateReader(FileReader):
    """Copies as a GPU may: at the last moment, when their end is waited for."""

    def _copy(self, targets: Any, sources: Any) -> Any:
        return Late(lambda: super(LateReader, self)._copy(targets, sources))


class Late:
    """Implements `CopyEvent`."""

    def __init__(self, copy: Callable[[], Any]) -> None:
        self.copy = copy
        self.num_asked = 0
        self.lock = threading.Lock()
        self.is_done = False

    def query(self) -> bool:
        self.num_asked += 1
        if self.num_asked > 20:  # long after the next buckets might have been read
            self.synchronize()
        return self.is_done

    def synchronize(self) -> None:
        with self.lock:
            if not self.is_done:
                self.copy()
                self.is_done = True


def test_a_host_buffer_is_read_into_again_when_the_copies_out_of_it_have_ended(
    tmp_path: Path,
) -> None:
    named = buckets()
    files = written(tmp_path, named)
    found = received(LateReader(CPU, BUCKET_BYTES), files)
    assert digests(found.items()) == digests(named.items())


# The engine


def engine(device: torch.device, staging: str = "auto") -> LocalEngine:
    extra = {"inflight": {"staging": staging}}
    config = SimpleNamespace(
        additional_config=extra, parallel_config=None, model_config=None
    )
    return LocalEngine(None, config, device, Recorder())


@pytest.mark.parametrize(
    ("device", "staging", "fills_gpu"),
    [
        ("cpu", "auto", False),
        ("cuda", "auto", True),
        ("cuda", "device", True),
        ("cuda", "host", False),
    ],
)
def test_files_are_read_into_gpu_memory_only_if_weights_are_staged_there(
    device: str, staging: str, fills_gpu: bool
) -> None:
    assert engine(torch.device(device), staging).fills_gpu is fills_gpu


@pytest.mark.parametrize(("device", "is_shared"), [("cpu", False), ("cuda", True)])
def test_files_for_the_host_of_a_gpu_are_read_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, is_shared: bool
) -> None:
    seen: list[int] = []

    def read(opened: Any, num_threads: int) -> Iterator[Any]:
        seen.append(num_threads)
        yield from ()

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(receiver_engine, "read_opened", read)
    receiving = engine(torch.device(device), "host")
    receiving.vllm_config.parallel_config = SimpleNamespace(
        local_world_size=1, data_parallel_size_local=1
    )
    (file,) = written(tmp_path, {"one": torch.ones(3)}, 1)
    receiving.receive_weights(receiving.parse_update_info({"path": str(file)}))
    assert [num > 1 for num in seen] == [is_shared]


@pytest.mark.parametrize("fills_gpu", [False, True])
def test_a_drafters_tensors_are_renamed_in_every_way_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fills_gpu: bool
) -> None:
    monkeypatch.setattr(LocalEngine, "fills_gpu", fills_gpu)
    monkeypatch.setattr(receiver_engine, "BUCKET_BYTES", BUCKET_BYTES)
    named = {"one": torch.ones(3), "draft.two": torch.ones(2)}
    receiving = engine(CPU)
    (file,) = written(tmp_path, named, 1)
    info = receiving.parse_update_info({"path": str(file), "draft": True})
    receiving.receive_weights(info)
    assert receiving.model.loaded.keys() == {"draft.one", "draft.two"}
    receiving.shutdown()
