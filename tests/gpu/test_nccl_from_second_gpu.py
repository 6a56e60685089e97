"""An `LLM` and an `AsyncLLM` are fed over NCCL from another GPU while they decode."""

from pathlib import Path

import pytest
import torch

from tests.e2e.test_fed_engines import feed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, one for the trainer"
    ),
]

SHAPE = {"hidden": 1024, "layers": 4, "vocab": 20000}
"""So that an update is many buckets."""


@pytest.mark.parametrize("kind", ["llm", "async_llm"])
def test_a_rank_serves_the_weights_from_a_trainer_on_another_gpu(
    old: Path, new: Path, kind: str
) -> None:
    feed(kind, old, new, "inflight_nccl")
