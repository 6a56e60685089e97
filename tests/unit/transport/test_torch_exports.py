"""GPU tensors that torch has exported are read by ranks, and nothing else is opened.

On host memory here; tests/gpu reads a GPU's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.transports.host_memory import HostMemory
from tests.support.transports.peers import CPU, Recorder, digests, tensors
from tests.support.transports.torch_exporter import (
    Call,
    Exporter,
    exported,
    pickled,
)
from vllm.inflight.errors import Cancelled, Malformed, TransferFault
from vllm.inflight.transport.cuda_ipc import torch_exports
from vllm.inflight.transport.cuda_ipc.driver import HANDLE_BYTES
from vllm.inflight.transport.cuda_ipc.receiver_engine import (
    EXPORTED_BUCKET_BYTES,
    ExportedEngine,
)
from vllm.inflight.transport.sglang.request_tensors import spooled


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def exporter(memory: HostMemory) -> Exporter:
    return Exporter(memory)


@pytest.fixture
def engine(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> ExportedEngine:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    made = ExportedEngine(None, config, CPU, Recorder())
    # A CPU has no CUDA driver, whose place the host memory takes.
    monkeypatch.setattr(
        made, "init_transfer_engine", lambda info: made._open(info, memory)
    )
    return made


@pytest.fixture(autouse=True)
def counted(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let counters be counted down, which torch's CPU build cannot."""
    exporter.let_count(monkeypatch)


def receive(engine: ExportedEngine, entry: str, load_format: str | None = None) -> None:
    with spooled([entry], load_format, allow_pickle=True) as read:
        assert read.transport == "exported"
        (info,) = read.infos
        engine.receive_weights(engine.parse_update_info(info))


def test_exported_tensors_are_copied_from_the_senders_memory(
    engine: ExportedEngine,
    exporter: Exporter,
    memory: HostMemory,
) -> None:
    named = {name: tensor.contiguous() for name, tensor in tensors().items()}
    receive(engine, exported(exporter, named.items()))
    assert digests(engine.model.loaded.items()) == digests(named.items())
    # A mapping would keep memory that the trainer frees for its next step.
    assert memory.mapped == set()
    assert exporter.counts.sum() == 0


def test_a_tensor_that_is_larger_than_a_bucket_is_copied(
    engine: ExportedEngine, exporter: Exporter
) -> None:
    large = torch.arange(EXPORTED_BUCKET_BYTES // 8 + 3)
    receive(engine, exported(exporter, [("large", large)]))
    assert torch.equal(engine.model.loaded["large"], large)


def bucket_of(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[str, dict[str, torch.Tensor]]:
    """A flattened bucket with the classes of SGLang, and what is in it."""
    named = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.ones(1)}
    flat = torch.cat([t.flatten().view(torch.uint8) for t in named.values()])
    where = "sglang.srt.weight_sync.tensor_bucket"
    record = type("FlattenedTensorMetadata", (), {"__module__": where})
    module = ModuleType(where)
    module.FlattenedTensorMetadata = record  # type: ignore[attr-defined]
    parts, start = [], 0
    for name, tensor in named.items():
        part = record()
        vars(part).update(name=name, shape=tensor.shape, dtype=tensor.dtype)
        vars(part).update(start_idx=start, end_idx=start + tensor.nbytes)
        start += tensor.nbytes
        parts.append(part)
    vars(parts[1]).update(changes)
    with monkeypatch.context() as patched:
        for each in ("sglang", "sglang.srt", "sglang.srt.weight_sync", where):
            patched.setitem(sys.modules, each, module)
        entry = pickled({"flattened_tensor": exporter.call(flat), "metadata": parts})
    return entry, named


def test_a_flattened_bucket_in_the_senders_memory_is_cut_into_its_tensors(
    engine: ExportedEngine,
    exporter: Exporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry, named = bucket_of(exporter, monkeypatch)
    receive(engine, entry, "flattened_bucket")
    assert digests(engine.model.loaded.items()) == digests(named.items())
    assert exporter.counts.sum() == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"end_idx": 1 << 40},
        {"start_idx": -1},
        {"start_idx": 0.0},
        {"shape": (8,)},
        {"shape": (-1,)},
        {"dtype": torch.float64},
        {"dtype": "nn"},
    ],
    ids=str,
)
def test_a_part_beyond_the_bucket_is_rejected(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    entry, _ = bucket_of(exporter, monkeypatch, **changes)
    with (
        pytest.raises(Malformed, match="is no part of the bucket"),
        spooled([entry], "flattened_bucket", allow_pickle=True),
    ):
        pass


def test_the_function_of_sglang_is_read_as_the_function_of_torch(
    engine: ExportedEngine, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "sglang.srt.utils.patch_torch"
    module = ModuleType(where)

    def rebuild(*_: Any) -> None:
        raise AssertionError("a pickle has called a function")

    rebuild.__module__, rebuild.__qualname__ = where, "_rebuild_cuda_tensor_modified"
    module._rebuild_cuda_tensor_modified = rebuild  # type: ignore[attr-defined]
    held = torch.randn(4)
    arguments = exporter.arguments(held, storage_device="GPU-0a1b")
    with monkeypatch.context() as patched:
        for each in ("sglang", "sglang.srt", "sglang.srt.utils", where):
            patched.setitem(sys.modules, each, module)
        entry = pickled([("a", Call(rebuild, *arguments))])
    receive(engine, entry)
    assert torch.equal(engine.model.loaded["a"], held)


@pytest.mark.parametrize("version", [b"", b"\2c", b"\3c"], ids=["bare", "2", "3"])
def test_handles_of_every_release_of_torch_are_read(
    engine: ExportedEngine, exporter: Exporter, version: bytes
) -> None:
    held = torch.randn(4)
    handle = held.data_ptr().to_bytes(HANDLE_BYTES, "big")
    call = exporter.call(held, storage_handle=version + handle)
    receive(engine, pickled([("a", call)]))
    assert torch.equal(engine.model.loaded["a"], held)


def test_a_parameter_and_part_of_a_storage_are_read_in_place(
    engine: ExportedEngine, exporter: Exporter
) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    named = {"cut": whole[2:4], "parameter": torch.nn.Parameter(whole)}
    receive(engine, exported(exporter, named.items()))
    for name, tensor in named.items():
        assert torch.equal(engine.model.loaded[name], tensor.detach())


REJECTED = {
    "another form of handle": ({"storage_handle": b"\4c" + bytes(64)}, "another form"),
    "a short handle": ({"storage_handle": bytes(63)}, "another form"),
    "an expandable segment": ({"storage_handle": b"\2e" + bytes(9)}, "expandable"),
    "no handle": ({"storage_handle": "x"}, "no handle"),
    "no memory": ({"storage_handle": None}, "no memory"),
    "rows that are not contiguous": ({"tensor_stride": (1, 6)}, "not contiguous"),
    "more than its memory": ({"tensor_size": (7, 4)}, "larger than its memory"),
    "an offset": ({"tensor_offset": 1}, "larger than its memory"),
    "an offset below 0": ({"tensor_offset": -1}, "invalid"),
    "a place below 0": ({"storage_offset_bytes": -1}, "place is invalid"),
    "a size that is no count": ({"tensor_size": (True, 4)}, "invalid"),
    "strides of another number": ({"tensor_stride": (1,)}, "invalid"),
    "a dtype that is none": ({"dtype": "float32"}, "invalid"),
    "an event that is none": ({"event_handle": b"x"}, "event has no handle"),
    "a counter in a folder": ({"ref_counter_handle": b"/../etc/passwd"}, "no counter"),
    "a counter beyond its file": ({"ref_counter_offset": 10_000}, "no counter"),
    "a counter before its file": ({"ref_counter_offset": -1}, "no counter"),
    "a counter of another host": (
        {"ref_counter_handle": b"/torch_1_2_3"},
        "on another host",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_mapped_is_rejected_by_name(
    exporter: Exporter, name: str
) -> None:
    changes, told = REJECTED[name]
    call = exporter.call(torch.ones(6, 4), **changes)
    with (
        pytest.raises(Malformed, match=rf"\[0\]: .*{told}"),
        spooled([pickled([("a", call)])], None, allow_pickle=True),
    ):
        pass


def test_counters_of_another_user_and_other_files_are_rejected(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = exported(exporter, [("a", torch.ones(2))])
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with (
            pytest.raises(Malformed, match="runs as user"),
            spooled([entry], None, allow_pickle=True),
        ):
            pass
    # A tensor that somebody shares between processes has such a name, too.
    shared = torch.UntypedStorage._new_using_filename_cpu(800)
    _, name, _ = shared._share_filename_cpu_()
    call = exporter.call(torch.ones(2), ref_counter_handle=name)
    with (
        pytest.raises(Malformed, match="864 bytes"),
        spooled([pickled([("a", call)])], None, allow_pickle=True),
    ):
        pass
    link = Path("/dev/shm") / f"torch_{os.getpid()}_1_1"
    link.symlink_to(exporter.counters.decode()[1:])
    try:
        call = exporter.call(torch.ones(2), ref_counter_handle=f"/{link.name}".encode())
        with (
            pytest.raises(Malformed, match="bytes"),
            spooled([pickled([("a", call)])], None, allow_pickle=True),
        ):
            pass
    finally:
        link.unlink()


def test_bytes_and_gpu_memory_cannot_be_mixed(exporter: Exporter) -> None:
    held = torch.ones(2)
    mixed = pickled([("a", exporter.call(held)), ("b", held)])
    for entries in (
        [mixed],
        [exported(exporter, [("a", held)]), pickled([("a", held)])],
    ):
        with (
            pytest.raises(Malformed, match="bytes, and others"),
            spooled(entries, None, allow_pickle=True),
        ):
            pass


def test_exported_memory_is_released_after_a_failure(
    engine: ExportedEngine,
    exporter: Exporter,
    memory: HostMemory,
) -> None:
    entry = exported(exporter, [("a", torch.ones(2))])
    memory.exported.clear()  # the trainer has ended
    with pytest.raises(TransferFault, match="cannot map"):
        receive(engine, entry)
    assert exporter.counts.sum() == 0


def test_memory_of_a_rejected_request_is_given_back(exporter: Exporter) -> None:
    held = torch.ones(6, 4)
    good = ("a", exporter.call(held))
    bad = ("b", exporter.call(held, tensor_stride=(1, 6)))
    entries = [pickled([good, bad]), pickled([good, ("c", held)])]
    for load_format, entry in ((None, entries[0]), (None, entries[1])):
        assert exporter.counts.sum() > 0
        with (
            pytest.raises(Malformed),
            spooled([entry], load_format, allow_pickle=True),
        ):
            pass
        exporter.counts[2] = 1
    exporter.counts[2] = 0
    assert exporter.counts.sum() == 0


def test_a_request_that_is_sent_again_counts_down_once(
    engine: ExportedEngine, exporter: Exporter
) -> None:
    entry = exported(exporter, [("a", torch.ones(2))])
    for _ in range(2):
        receive(engine, entry)
    # Torch's counter has no sign: below 0 it would never be 0 again.
    assert exporter.counts.min() == 0


def test_a_tensor_without_elements_gives_its_memory_back(
    engine: ExportedEngine, exporter: Exporter
) -> None:
    whole = torch.ones(8)
    receive(engine, exported(exporter, [("none", whole[0:0]), ("whole", whole)]))
    assert engine.model.loaded["none"].shape == (0,)
    assert exporter.counts.sum() == 0


def test_a_copy_waits_for_the_work_of_the_trainer(
    engine: ExportedEngine, exporter: Exporter, memory: HostMemory
) -> None:
    held = torch.zeros(2)
    entry = exported(exporter, [("a", held)])
    (event,) = memory.events
    answers = iter([False, False, True])

    def has_passed() -> bool:
        answer = next(answers)
        if answer:
            held.fill_(1)
        return answer

    memory.events[event] = has_passed
    receive(engine, entry)
    assert engine.model.loaded["a"].tolist() == [1, 1]
    entry = exported(exporter, [("a", held)])
    memory.events[list(memory.events)[-1]] = lambda: False
    engine.cancelled = lambda: True
    with pytest.raises(Cancelled, match="work of the trainer's GPU"):
        receive(engine, entry)
    assert memory.mapped == set()


def test_a_tensor_that_needs_no_event_waits_for_none(
    engine: ExportedEngine, exporter: Exporter, memory: HostMemory
) -> None:
    held = torch.ones(2)
    call = exporter.call(held, event_sync_required=False, event_handle=b"")
    memory.events.clear()
    receive(engine, pickled([("a", call)]))
    assert torch.equal(engine.model.loaded["a"], held)


def test_the_format_of_the_counters_is_that_of_torch() -> None:
    storage = torch.UntypedStorage._new_using_filename_cpu(
        8 * torch_exports.COUNTERS_PER_FILE
    )
    _, name, _ = storage._share_filename_cpu_()
    assert torch_exports.COUNTERS.fullmatch(name)
    file = Path("/dev/shm") / name.decode()[1:]
    assert file.stat().st_size == torch_exports.COUNTERS_BYTES
    assert torch_exports.Counter.of(name, 0).index == 0
