"""Files that are read into page-locked memory and copied to the GPU from there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.broken_files import cut_when_begun
from tests.support.engines.probe import commits_and_rollbacks, greedy, state
from vllm.inflight.errors import Malformed
from vllm.inflight.transport.buckets.receiver import Receiver
from vllm.inflight.transport.files import bucket_reader, receiver_engine
from vllm.inflight.transport.files.bucket_reader import FileReader
from vllm.inflight.transport.files.safetensors_files import TensorFiles
from vllm.inflight.transport.waiting import WaitLimit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 1024, "layers": 4, "vocab": 20000}


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    inflight = {"staging": "device"}
    return start(old, additional_config={"inflight": inflight})


@pytest.fixture(params=[False, True], ids=["at_once", "in_small_pieces"])
def made(
    request: pytest.FixtureRequest, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> list[FileReader]:
    """The readers that were made; none is left of another test."""
    readers: list[FileReader] = []

    def make(*args: Any) -> FileReader:
        readers.append(FileReader(*args))
        return readers[-1]

    monkeypatch.setattr(receiver_engine, "FileReader", make)
    if request.param:
        # The embedding is larger than a bucket, and a bucket is read in many runs.
        monkeypatch.setattr(receiver_engine, "BUCKET_BYTES", 1 << 20)
        monkeypatch.setattr(bucket_reader, "RUN_BYTES", 1 << 16)
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    executor.driver_worker.worker.vllm_inflight.stager.local.shutdown()
    return readers


def test_weights_read_from_files_equal_a_fresh_engine(
    made: list[FileReader],
    engine: Any,
    fresh: list[list[int]],
    old: Path,
    new: Path,
) -> None:
    engine.update_weights_from_disk(str(old), "old")
    for _ in range(2):
        commits_and_rollbacks(engine, old, new, fresh)
    assert len(made) == 1


def test_a_file_cut_short_leaves_what_is_served(
    made: list[FileReader],
    engine: Any,
    fresh: list[list[int]],
    old: Path,
    new: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.update_weights_from_disk(str(old), "old")
    before = state(engine)
    file = tmp_path / "cut.safetensors"
    file.write_bytes((new / "model.safetensors").read_bytes())
    with monkeypatch.context() as patched:
        cut_when_begun(patched, file)
        with pytest.raises(Malformed, match=r"cut\.safetensors.*it ends at"):
            engine.update_weights_from_disk(str(file), "bad")
    assert state(engine) == before
    engine.update_weights_from_disk(str(new), "new")
    assert greedy(engine) == fresh


def test_every_byte_arrives_while_the_gpu_lags_behind(tmp_path: Path) -> None:
    """Neither a bucket nor a host buffer is used again before the GPU is done."""
    device, watch = torch.device("cuda", 0), WaitLimit(60.0)
    named = {str(n): torch.full((1 << 18,), float(n)) for n in range(64)}
    save_file(named, tmp_path / "model.safetensors")
    reader = FileReader(device, 1 << 20)
    sums: dict[str, torch.Tensor] = {}
    with TensorFiles([tmp_path / "model.safetensors"]) as opened:
        receiver = Receiver(reader, 3, watch)
        reader.begin(opened)
        for name, tensor in receiver.tensors(opened.tensor_list, watch):
            torch.cuda._sleep(2_000_000)
            sums[name] = torch.stack([tensor.min(), tensor.max()])
            del tensor
        reader.close()
    expected = load_file(tmp_path / "model.safetensors")
    for name, tensor in expected.items():
        assert sums[name].tolist() == [tensor.min().item(), tensor.max().item()]
