"""Files read as for a GPU, on a CPU engine: through host buffers and in buckets."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.broken_files import BROKEN, cut_when_begun
from tests.support.engines.probe import commits_and_rollbacks, greedy, state
from tests.support.transports.peers import open_things
from tests.support.waiting import until
from vllm.inflight.errors import InflightError, Malformed
from vllm.inflight.transport.buckets import buffers
from vllm.inflight.transport.buckets.buffers import Buffers
from vllm.inflight.transport.files import receiver_engine
from vllm.inflight.transport.files.bucket_reader import FileReader
from vllm.inflight.transport.files.receiver_engine import LocalEngine

pytestmark = pytest.mark.engine


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FileReader]:
    """The readers that were made; files are read by them from here on."""
    readers: list[FileReader] = []

    def make(*args: Any) -> FileReader:
        readers.append(FileReader(*args))
        return readers[-1]

    monkeypatch.setattr(LocalEngine, "fills_gpu", True)
    monkeypatch.setattr(receiver_engine, "FileReader", make)
    # The embedding of the tiny models is larger.
    monkeypatch.setattr(receiver_engine, "BUCKET_BYTES", 1 << 12)
    return readers


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    return start(old)


@pytest.fixture
def served(engine: Any, made: list[FileReader], old: Path) -> Any:
    """The engine on the old weights, without a reader yet."""
    stager = engine.llm_engine.engine_core.engine_core.model_executor
    stager = stager.driver_worker.worker.vllm_inflight.stager
    stager.local.shutdown()
    yield engine
    engine.update_weights_from_disk(str(old), "old")
    stager.local.shutdown()


def test_weights_read_from_files_equal_a_fresh_engine_and_the_reader_is_kept(
    served: Any, made: list[FileReader], fresh: list[list[int]], old: Path, new: Path
) -> None:
    commits_and_rollbacks(served, old, new, fresh)
    assert len(made) == 1


def test_a_broken_file_leaves_what_is_served(
    served: Any, made: list[FileReader], old: Path, new: Path, tmp_path: Path
) -> None:
    served.update_weights_from_disk(str(old), "old")
    before, opened = state(served), open_things()
    for data in BROKEN.values():
        file = tmp_path / "broken.safetensors"
        file.write_bytes(data)
        with pytest.raises(Malformed, match=r"broken\.safetensors is not a whole"):
            served.update_weights_from_disk(str(file), "bad")
    assert state(served) == before
    until(lambda: open_things() <= opened)


def test_a_file_cut_short_in_the_middle_leaves_what_is_served(
    served: Any,
    made: list[FileReader],
    fresh: list[list[int]],
    old: Path,
    new: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served.update_weights_from_disk(str(old), "old")
    before, opened = state(served), open_things()
    file = tmp_path / "cut.safetensors"
    file.write_bytes((new / "model.safetensors").read_bytes())
    kept: list[Any] = []

    class Noted(Buffers):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.append(weakref.ref(self))

    with monkeypatch.context() as patched:
        patched.setattr(buffers, "Buffers", Noted)
        cut_when_begun(patched, file)
        gc.disable()  # a GPU's memory does not wait for a collection
        try:
            with pytest.raises(Malformed, match=r"cut\.safetensors.*it ends at"):
                served.update_weights_from_disk(str(file), "bad")
            until(lambda: all(buckets() is None for buckets in kept))
        finally:
            gc.enable()
    assert kept
    assert state(served) == before
    until(lambda: open_things() <= opened)
    served.update_weights_from_disk(str(new), "new")
    assert greedy(served) == fresh


@pytest.mark.parametrize("has_had_some", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize(
    "taken",
    ["files.receiver_engine.Receiver", "buckets.reassembly.Reassembly.make_room"],
    ids=["buckets", "pieces"],
)
def test_files_are_read_even_if_there_is_no_memory_for_buckets(
    served: Any,
    made: list[FileReader],
    fresh: list[list[int]],
    old: Path,
    new: Path,
    monkeypatch: pytest.MonkeyPatch,
    taken: str,
    has_had_some: bool,
) -> None:
    def refuse(*_: Any) -> None:
        raise receiver_engine.torch.OutOfMemoryError("none")

    if has_had_some:
        served.update_weights_from_disk(str(old), "old")
    monkeypatch.setattr(f"vllm.inflight.transport.{taken}", refuse)
    served.update_weights_from_disk(str(new), "new")
    assert greedy(served) == fresh


def test_an_update_that_is_aborted_lets_files_go(
    served: Any, made: list[FileReader], new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, opened = state(served), open_things()
    real = os.preadv

    def abort(*args: Any) -> int:
        monkeypatch.setattr(os, "preadv", real)
        served.abort_weight_update()
        return real(*args)

    monkeypatch.setattr(os, "preadv", abort)
    with pytest.raises(InflightError):
        served.update_weights_from_disk(str(new), "bad")
    assert state(served) == before
    until(lambda: open_things() <= opened)
