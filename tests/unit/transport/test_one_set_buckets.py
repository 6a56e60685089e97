"""Beside one set of weights, the buckets of a worker are few and small."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.transports.host_memory import HostMemory
from tests.support.transports.lent_to import worker
from tests.support.transports.peers import (
    CPU,
    Recorder,
    connect,
    digests,
    engine,
    tensors,
    transfer,
)
from vllm.inflight.delta.parts import ArrivingParts
from vllm.inflight.errors import ConfigError
from vllm.inflight.patch.worker import _check_room
from vllm.inflight.transport.buckets.buffers import Buffers, one_set_bucket_bytes
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.cuda_ipc.receiver_engine import IpcEngine
from vllm.inflight.transport.files.receiver_engine import LocalEngine
from vllm.inflight.worker.staging.worker import StagingWorker

MIB = 1 << 20
MOST = 64 * MIB
OF_ONE_SET = 2, MOST


def buckets(receiver: Receiver | None) -> tuple[int, int]:
    """How many buckets there are, and the bytes of each."""
    assert receiver is not None
    return receiver._slots.count, receiver._slots.num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, 48), (16_381_470_720, 58), (65_500_000_000, 234), (10**12, 256)],
)
def test_a_bucket_grows_with_the_weights(num_bytes: int, expected: int) -> None:
    found = one_set_bucket_bytes(num_bytes)
    assert found == expected * MIB
    assert expected == 48 or 2 * found / num_bytes <= 0.0075


@pytest.mark.parametrize(
    ("most", "expected"), [(None, (3, 256 * MIB)), (MOST, OF_ONE_SET)]
)
def test_lent_tensors_are_read_through_few_buckets(
    monkeypatch: pytest.MonkeyPatch, most: int | None, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(IpcEngine, "most_bucket_bytes", most)
    made = worker(HostMemory(), bucket_bytes=256 * MIB)
    assert buckets(made._receiver) == expected
    made.shutdown()


def test_a_smaller_bucket_than_the_most_stays_as_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(IpcEngine, "most_bucket_bytes", MOST)
    made = worker(HostMemory(), bucket_bytes=MIB, num_buckets=1)
    assert buckets(made._receiver) == (1, MIB)
    made.shutdown()


@pytest.mark.parametrize(("size", "agreed"), [(MIB, MIB), (256 * MIB, 64 * MIB)])
def test_a_broadcast_is_received_in_two_buckets_of_a_size_that_all_ranks_have(
    size: int, agreed: int
) -> None:
    to, named = engine(), tensors(1)
    to.most_bucket_bytes = MOST
    sender = connect(to, num_buckets=5, bucket_bytes=size)
    assert buckets(to._receiver) == (2, agreed)
    assert sender.group.terms.bucket_bytes == sender._slots.num_bytes == agreed
    transfer(to, sender, named)
    assert digests(to.model.loaded.items()) == digests(named.items())
    sender.group.close()
    to.shutdown()


class Deltas:
    """A model that takes the parts of a delta, as a loader does."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def load_weights(self, weights: Any) -> None:
        arriving = ArrivingParts()
        for batch in weights.batches():
            for name, tensor in batch:
                self.parts += [
                    part.table.numpy().tobytes() + part.data.numpy().tobytes()
                    for part in arriving.add(name, tensor)
                ]
                del tensor
            batch.clear()
        arriving.require_all()


def test_parts_of_a_delta_need_no_third_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of a part may come in one bucket, and its data in the next."""
    made: list[int] = []
    new = Buffers._new

    def counted(buffers: Buffers, num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return new(buffers, num_bytes)

    to = engine(model := Deltas())
    to.most_bucket_bytes = MOST
    sender = connect(to, num_buckets=5)
    monkeypatch.setattr(Buffers, "_new", counted)
    sent: dict[str, torch.Tensor] = {}
    for number in range(9):  # two parts and a table fit into a bucket
        sent[f"delta.{number}.table"] = torch.full((40,), number, dtype=torch.uint8)
        sent[f"delta.{number}.data"] = torch.full((1900,), number, dtype=torch.uint8)
    transfer(to, sender, sent)
    assert model.parts == [bytes([number]) * 1940 for number in range(9)]
    assert not any(made)
    sender.group.close()
    to.shutdown()


def test_files_are_read_through_few_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    class Noted(Receiver):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(buckets(self))

    where = "vllm.inflight.transport.files.receiver_engine.Receiver"
    monkeypatch.setattr(where, Noted)
    monkeypatch.setattr(LocalEngine, "fills_gpu", True)
    config = SimpleNamespace(
        additional_config={}, parallel_config=None, model_config=None
    )
    to = LocalEngine(None, config, CPU, Recorder())
    to.most_bucket_bytes = MOST
    file = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(3)}, file)
    to.receive_weights(to.parse_update_info({"path": str(file)}))
    assert made == [OF_ONE_SET]
    to.shutdown()


@pytest.mark.parametrize(
    ("log", "device", "expected"),
    [
        (object(), "cuda", 2 * 234 * MIB),
        (None, "cuda", 0),  # two sets of weights
        (object(), "cpu", 0),
    ],
)
def test_the_bytes_of_the_buckets_are_known_before_a_transport_is_open(
    log: object, device: str, expected: int
) -> None:
    stager = object.__new__(StagingWorker)
    stager.shadow = SimpleNamespace(log=log, nbytes=65_500_000_000)  # type: ignore[assignment]
    stager.worker = SimpleNamespace(device=torch.device(device))  # type: ignore[assignment]
    assert stager.bucket_bytes == expected


def test_a_kv_cache_of_a_given_size_leaves_room_for_the_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 3 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 2 << 30)
    _check_room(11 << 30, 0, gpu)
    with pytest.raises(ConfigError, match=r"asks for 11\.00 GiB"):
        _check_room(11 << 30, 128 * MIB, gpu)
