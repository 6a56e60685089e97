"""Upstream's own dense transports, created on the second set, from its own trainers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 512, "layers": 2}
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for the trainer"
)


@pytest.mark.parametrize(
    ("backend", "gpu", "options"),
    [
        pytest.param("nccl", -1, {"packed": True}, marks=needs_two),
        pytest.param("nccl", -1, {"packed": False}, marks=needs_two),
        # On the engine's own GPU: nothing leaves it.
        ("ipc", 0, {"packed": False}),
        ("ipc", 0, {"packed": True, "packed_buffer_size_bytes": 1 << 20}),
    ],
)
def test_updates_through_upstreams_transport_equal_a_fresh_engine(
    start: Callable[..., Any],
    fresh: list[list[int]],
    old: Path,
    new: Path,
    backend: str,
    gpu: int,
    options: dict[str, Any],
) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    transport = WeightTransferConfig(backend=backend)
    llm = start(old, weight_transfer_config=transport)
    before = greedy(llm)
    assert before != fresh
    with FarTrainer(llm, backend, new, gpu=gpu, **options) as far:
        for folder, expected in ((new, fresh), (old, before), (new, fresh)):
            far.send(folder)
            assert greedy(llm) == expected
        llm.rollback_weights()
        assert greedy(llm) == before
