"""Memory that trainers lend through SGLang's routes is served by a real engine.

Host memory takes the place of a GPU's: the engine, its staging thread and the trainer
are in this process. tests/gpu lends memory of a GPU.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from tests.support.engines.core_door import Door, said
from tests.support.engines.sent_tensors import entry, halves, tensors
from tests.support.transports.host_memory import HostMemory
from tests.support.transports.lending_process import LendingProcess
from tests.support.transports.torch_exporter import Exporter, exported
from vllm.inflight.transport.cuda_ipc.receiver_engine import IpcEngine
from vllm.inflight.transport.sglang.checkpoint_engine import CheckpointEngine

pytestmark = pytest.mark.engine

HEAD = "lm_head.weight"
GPU = "GPU-0a1b"


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory()


@pytest.fixture
def exporter(memory: HostMemory) -> Exporter:
    return Exporter(memory)


@pytest.fixture
def lender(
    door: Door, memory: HostMemory, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> Door:
    """A server that reads pickles, and maps host memory."""
    config = {"inflight": {"pickled_tensors": "on"}}
    monkeypatch.setattr(door.core.vllm_config, "additional_config", config)
    monkeypatch.setattr(
        IpcEngine, "init_transfer_engine", lambda self, info: self._open(info, memory)
    )
    monkeypatch.setattr(CheckpointEngine, "gpu", GPU)
    exporter.let_count(monkeypatch)
    return door


@pytest.fixture
def process(tmp_path: Path, exporter: Exporter) -> Iterator[LendingProcess]:
    made = LendingProcess(tmp_path, torch.zeros(1 << 20, dtype=torch.uint8))
    yield made
    made.close()


def test_handles_of_a_list_are_served_as_the_tensors_are(
    lender: Door, folders: dict[str, Path], expected: Any, exporter: Exporter
) -> None:
    named = tensors(folders["new"])
    body = {"serialized_named_tensors": [exported(exporter, named.items())]}
    reply = lender.post("/update_weights_from_tensor", **body, weight_version="lent")
    assert (reply["success"], reply["weight_version"]) == (True, "lent")
    assert said(lender.core) == expected
    assert exporter.counts.sum() == 0


def test_bytes_cannot_complete_a_version_that_began_with_handles(
    lender: Door, folders: dict[str, Path], expected: Any, exporter: Exporter
) -> None:
    first, last = halves(tensors(folders["new"]))
    path = "/update_weights_from_tensor"
    lender.post(path, serialized_named_tensors=[exported(exporter, first.items())])
    status, message = lender.refused(path, serialized_named_tensors=[entry(last)])
    assert (status, "came in another way" in message) == (409, True), message
    lender.post(path, serialized_named_tensors=[exported(exporter, last.items())])
    assert said(lender.core) == expected


def lend(
    process: LendingProcess, exporter: Exporter, named: dict[str, torch.Tensor]
) -> None:
    """Send these in two fills of the buffer, as release 0.4 does."""
    buffer = reductions.rebuild_cuda_tensor, tuple(exporter.arguments(process.buffer))
    fills = [partial(process.put, part) for part in halves(named)]
    process.send(buffer, *fills, None, None)


def test_the_buffer_of_a_checkpoint_engine_is_served_when_the_call_returns(
    lender: Door,
    process: LendingProcess,
    folders: dict[str, Path],
    expected: Any,
    exporter: Exporter,
) -> None:
    lend(process, exporter, tensors(folders["new"]))
    body = {"zmq_handles": {GPU: process.address}, "weight_version": "lent"}
    reply = lender.post("/update_weights_from_ipc", **body)
    assert (reply["success"], reply["weight_version"]) == (True, "lent")
    assert said(lender.core) == expected
    process.close()
    assert process.has_ended
    assert process.replies == [b""] * 5
    assert exporter.counts.sum() == 0


def test_a_version_that_lacks_a_tensor_is_rejected_and_the_next_one_is_served(
    lender: Door,
    tmp_path: Path,
    folders: dict[str, Path],
    expected: Any,
    exporter: Exporter,
) -> None:
    before = said(lender.core)
    whole = tensors(folders["new"])
    part = {name: tensor for name, tensor in whole.items() if name != HEAD}
    path = "/update_weights_from_ipc"
    for number, named in enumerate((part, whole)):
        folder = tmp_path / str(number)
        folder.mkdir()
        buffer = torch.zeros(1 << 20, dtype=torch.uint8)
        process = LendingProcess(folder, buffer)
        try:
            lend(process, exporter, named)
            handles = {GPU: process.address}
            if named is part:
                status, message = lender.refused(path, zmq_handles=handles)
                assert (status, HEAD in message) == (422, True), message
                assert lender.get("/weight_update")["active"] is None
                assert said(lender.core) == before
            else:
                assert lender.post(path, zmq_handles=handles)["success"]
        finally:
            process.close()
        assert process.has_ended
    assert said(lender.core) == expected


def test_a_rejected_call_tells_the_checkpoint_engine(
    lender: Door, process: LendingProcess, folders: dict[str, Path], exporter: Exporter
) -> None:
    process.send(
        (reductions.rebuild_cuda_tensor, tuple(exporter.arguments(process.buffer))),
        RuntimeError("Some workers failed"),
    )
    body = {"zmq_handles": {GPU: process.address}, "selector": "draft"}
    status, message = lender.refused("/update_weights_from_ipc", **body)
    assert (status, "selector" in message) == (400, True), message
    process.close()
    assert process.has_ended
    assert b"selector" in process.replies[0]
