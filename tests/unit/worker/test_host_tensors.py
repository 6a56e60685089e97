"""Tensors of the host on their way to a GPU, in pieces; host memory is the GPU here."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm.inflight.worker.staging.adopted import host_tensors
from vllm.inflight.worker.staging.adopted.door import Batches
from vllm.inflight.worker.staging.adopted.host_tensors import HostTensors
from vllm.inflight.worker.staging.loader import UpdateLoader

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("least", [5, 1 << 20], ids=["threads", "one-thread"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(1000, dtype=torch.float32).bfloat16(),
        torch.arange(37, dtype=torch.uint8),
        torch.arange(16, dtype=torch.float32),  # 64 bytes: two whole pieces
        torch.arange(30, dtype=torch.float64).view(5, 6).t(),
        torch.arange(64).view(4, 16)[:, 3:9],
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.tensor([1.0, float("nan"), -0.0]).to(torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_is_copied_piece_by_piece_bit_for_bit(
    tensor: torch.Tensor, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tensors, "PIECE_BYTES", 32)
    monkeypatch.setattr(host_tensors, "LEAST_BYTES", least)
    copies = HostTensors(CPU)
    for _ in range(2):  # the second in the memory of the first
        made = copies.copied(tensor)
        assert (made.shape, made.dtype) == (tensor.shape, tensor.dtype)
        assert made.is_contiguous()
        assert not tensor.numel() or made.data_ptr() != tensor.data_ptr()
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (made, tensor)]
        assert torch.equal(*bits)


def test_several_threads_fill_a_large_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: dict[int, int] = {}
    together = threading.Barrier(host_tensors.NUM_THREADS)
    copyto = np.copyto

    def noted(target: np.ndarray, source: np.ndarray) -> None:
        together.wait(10)  # each waits until all fill
        filled[threading.get_ident()] = len(source)
        copyto(target, source)

    monkeypatch.setattr(host_tensors.np, "copyto", noted)
    tensor = torch.randint(256, (host_tensors.PIECE_BYTES - 3,), dtype=torch.uint8)
    assert torch.equal(HostTensors(CPU).copied(tensor), tensor)
    assert len(filled) == host_tensors.NUM_THREADS
    assert sum(filled.values()) == tensor.nbytes


def test_an_error_of_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such page")

    monkeypatch.setattr(host_tensors.np, "copyto", broken)
    with pytest.raises(ValueError, match="no such page"):
        HostTensors(CPU).copied(torch.ones(host_tensors.PIECE_BYTES // 4))


def test_an_engine_on_the_host_gets_the_tensor_itself() -> None:
    tensor = torch.ones(4)
    assert HostTensors(CPU).to_device(tensor) is tensor


def test_a_tensor_that_is_on_a_device_stays_there() -> None:
    tensor = torch.ones(4, device="meta")
    assert HostTensors(META).to_device(tensor) is tensor


def test_a_tensor_stays_on_the_host_where_the_device_has_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(HostTensors, "copied", no_memory)
    tensor = torch.ones(4)
    assert HostTensors(META).to_device(tensor) is tensor


def test_tensors_of_a_batch_are_copied_when_it_is_drawn() -> None:
    copied: list[torch.Tensor] = []

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor.to(META)

    tensors = [torch.ones(4), torch.zeros(2)]
    names: list[str] = []
    batches = Batches([*zip("ab", tensors, strict=True)], names, to_device).batches()
    assert not copied
    (batch,) = batches
    assert copied == tensors and names == ["a", "b"]
    assert all(tensor.is_meta for _, tensor in batch)


def test_of_a_mixed_batch_the_gpu_digests_its_own_tensors_alone() -> None:
    """Where the GPU has no memory for one of them, that one stays on the host."""
    digested: list[str] = []
    loader: Any = SimpleNamespace(
        _manifest=SimpleNamespace(model_name=lambda name: name),
        _accept=lambda name, tensor: True,
        _shadow=SimpleNamespace(plan=SimpleNamespace(is_home=lambda *_: False)),
        _sampler=SimpleNamespace(add=lambda pairs: None),
        _gpu_digest=SimpleNamespace(
            add=lambda pairs: digested.extend(name for name, _ in pairs)
        ),
        _delta=None,
        _verify=True,
        num_bytes=0,
        num_in_place=0,
    )
    batch: Any = [
        (name, SimpleNamespace(is_cuda=name != "host", nbytes=8))
        for name in ("host", "a", "b")
    ]
    assert len(UpdateLoader._accepted(loader, batch)) == 3
    assert digested == ["a", "b"]
