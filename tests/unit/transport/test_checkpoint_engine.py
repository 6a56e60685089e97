"""A checkpoint-engine lends one buffer again and again; ranks copy what is in it.

On host memory here; tests/gpu reads a GPU's.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from tests.support.transports.host_memory import HostMemory
from tests.support.transports.lending_process import LendingProcess
from tests.support.transports.peers import CPU, Recorder, digests, tensors
from tests.support.transports.torch_exporter import Exporter
from vllm.inflight.errors import Cancelled, Malformed, TransferFault
from vllm.inflight.transport.sglang import checkpoint_engine
from vllm.inflight.transport.sglang.checkpoint_engine import (
    CheckpointEngine,
    ZmqUpdateInfo,
)

GPU = "GPU-0a1b"
BUFFER_BYTES = 1 << 16


class Process(LendingProcess):
    """A process whose buffer is in host memory."""

    def __init__(self, folder: Path, memory: HostMemory) -> None:
        super().__init__(folder, torch.zeros(BUFFER_BYTES, dtype=torch.uint8))
        self.exporter = Exporter(memory)

    def lent(self) -> Any:
        """The message that lends the buffer."""
        arguments = self.exporter.arguments(self.buffer)
        return reductions.rebuild_cuda_tensor, tuple(arguments)


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def process(tmp_path: Path, memory: HostMemory) -> Iterator[Process]:
    made = Process(tmp_path, memory)
    yield made
    made.close()


@pytest.fixture
def engine(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> CheckpointEngine:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    made = CheckpointEngine(None, config, CPU, Recorder())
    monkeypatch.setattr(
        made, "init_transfer_engine", lambda info: made._open(info, memory)
    )
    monkeypatch.setattr(CheckpointEngine, "gpu", GPU)
    return made


@pytest.fixture(autouse=True)
def counted(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.exporter.let_count(monkeypatch)


def receive(engine: CheckpointEngine, process: Process) -> None:
    handles = {"GPU-of another": "ipc:///nowhere", GPU: process.address}
    engine.receive_weights(engine.parse_update_info({"zmq_handles": handles}))


@pytest.mark.parametrize("num_ends", [1, 2], ids=["until 0.3", "since 0.4"])
def test_a_buffer_that_is_filled_again_and_again_brings_all_tensors(
    engine: CheckpointEngine, process: Process, memory: HostMemory, num_ends: int
) -> None:
    named = {name: tensor.contiguous() for name, tensor in tensors().items()}
    small = {n: t for n, t in named.items() if t.nbytes <= BUFFER_BYTES}
    assert len(small) > 3
    whole = dict(list(small.items())[:3])
    fills = [partial(process.put, dict([pair])) for pair in small.items()]
    seen: list[tuple[int, bool]] = []

    def is_free() -> None:
        """Between the two ends, the process frees its buffer."""
        seen.append((int(process.exporter.counts.sum()), bool(memory.mapped)))

    ends = [None, lambda: is_free()][:num_ends]
    process.send(process.lent(), partial(process.put, whole), *fills, *ends)
    receive(engine, process)
    process.close()
    assert digests(engine.model.loaded.items()) == digests(small.items())
    assert process.replies == [b""] * (len(small) + 2 + num_ends)
    assert memory.num_maps == 1
    assert seen == [(0, False)] * (num_ends - 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offset": BUFFER_BYTES}, "is no tensor in a buffer"),
        ({"offset": -1}, "is no tensor in a buffer"),
        ({"shape": (-4,)}, "is no tensor in a buffer"),
        ({"shape": None}, "is no tensor in a buffer"),
        ({"dtype": "float32"}, "is no tensor in a buffer"),
        ({"name": print}, "builtins.print, which is not allowed"),
    ],
    ids=str,
)
def test_a_tensor_beyond_the_buffer_is_rejected_and_reported_to_the_sender(
    engine: CheckpointEngine, process: Process, change: dict[str, Any], told: str
) -> None:
    (entry,) = process.put({"a": torch.ones(4)})
    process.send(process.lent(), [entry | change], RuntimeError("Some workers failed"))
    with pytest.raises(Malformed, match=told):
        receive(engine, process)
    process.close()
    assert process.has_ended
    assert process.replies[0] == b""
    assert told in process.replies[1].decode()
    assert process.exporter.counts.sum() == 0
    assert engine.model.loaded == {}


def test_a_name_that_comes_twice_in_a_message_is_rejected(
    engine: CheckpointEngine, process: Process
) -> None:
    process.send(process.lent(), process.put({"a": torch.ones(4)}) * 2)
    with pytest.raises(Malformed, match="has come before"):
        receive(engine, process)


def test_a_sender_that_gives_up_ends_the_update(
    engine: CheckpointEngine, process: Process, memory: HostMemory
) -> None:
    failed = RuntimeError("Failed to update weights")
    process.send(process.lent(), process.put({"a": torch.ones(4)}), failed)
    with pytest.raises(TransferFault, match="gave up: Failed to update weights"):
        receive(engine, process)
    assert memory.mapped == set()


def test_a_model_that_rejects_a_tensor_tells_the_sender(
    engine: CheckpointEngine, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(_: Any) -> None:
        raise Malformed("the model has no such tensor")

    monkeypatch.setattr(engine.model, "load_weights", reject)
    process.send(process.lent(), process.put({"a": torch.ones(4)}))
    with pytest.raises(Malformed, match="no such tensor"):
        receive(engine, process)
    process.close()
    assert b"no such tensor" in process.replies[-1]


def test_waiting_for_a_silent_sender_ends(
    engine: CheckpointEngine, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.send(process.lent())
    monkeypatch.setattr(checkpoint_engine, "TIMEOUT_S", 0.2)
    with pytest.raises(TransferFault, match="for the checkpoint-engine"):
        receive(engine, process)
    process.close()
    assert process.has_ended


def test_a_rank_that_is_cancelled_tells_the_sender_at_its_next_message(
    engine: CheckpointEngine, process: Process
) -> None:
    parts = process.put({"a": torch.ones(4)})

    def late() -> Any:
        engine.cancelled = lambda: True
        time.sleep(0.5)
        return parts

    process.send(process.lent(), late, RuntimeError("Some workers failed"))
    with pytest.raises(Cancelled):
        receive(engine, process)
    process.close()
    assert process.has_ended
    assert process.replies[-1].startswith(b"Cancelled")


def test_a_sender_that_ends_is_noticed_at_once(
    engine: CheckpointEngine, process: Process
) -> None:
    process.send(process.lent())
    begun = time.monotonic()
    threading.Timer(0.5, process.close).start()
    with pytest.raises(TransferFault, match="has ended"):
        receive(engine, process)
    assert time.monotonic() - begun < checkpoint_engine.TIMEOUT_S


def test_a_rejected_call_tells_every_sender(process: Process) -> None:
    process.send(process.lent(), RuntimeError("Some workers failed"))
    info = ZmqUpdateInfo({"GPU-0": process.address})
    checkpoint_engine.reject(info, "requests are paused in place")
    process.close()
    assert process.has_ended
    assert process.replies == [b"requests are paused in place"]


def test_waiting_for_a_silent_sender_can_be_cancelled(
    engine: CheckpointEngine, process: Process
) -> None:
    engine.cancelled = lambda: True
    with pytest.raises(Cancelled):
        receive(engine, process)


def test_a_missing_address_for_a_gpu_is_reported_with_that_gpu(
    engine: CheckpointEngine,
) -> None:
    info = engine.parse_update_info({"zmq_handles": {"GPU-1": "ipc:///nowhere"}})
    with pytest.raises(Malformed, match=f"no address for {GPU}"):
        engine.receive_weights(info)


@pytest.mark.parametrize(
    "handles",
    [
        {},
        [],
        {GPU: 1},
        {GPU: "tcp://10.0.0.1:80"},
        {f"GPU-{n}": "ipc://a" for n in range(65)},
    ],
    ids=["none", "a list", "a number", "tcp", "more than a host has"],
)
def test_addresses_of_other_hosts_are_rejected(
    engine: CheckpointEngine, handles: Any
) -> None:
    with pytest.raises(ValueError, match=r"zmq_handles|must begin with ipc://"):
        engine.parse_update_info({"zmq_handles": handles})


@pytest.mark.parametrize(
    "message", [b"x", pickle.dumps(3), pickle.dumps([1]), pickle.dumps("a")], ids=str
)
def test_a_first_message_that_lends_nothing_is_rejected(
    engine: CheckpointEngine, process: Process, message: bytes
) -> None:
    process.send(message)
    with pytest.raises(Malformed, match="checkpoint-engine"):
        receive(engine, process)
