"""Memory that runs out while a version is staged; takes all of a GPU's for itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_trainer import (  # noqa: F401 (of this module's models)
    SHAPE,
    joined,
)
from tests.support.engines.probe import greedy
from vllm.inflight.errors import InflightError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, one for the trainer"
    ),
]


def test_memory_that_runs_out_while_staging_costs_nothing_but_the_update(
    start: Callable[..., Any],
    fresh: list[list[int]],
    old: Path,
    new: Path,
) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    transport = WeightTransferConfig(backend="inflight_nccl")
    llm = start(old, weight_transfer_config=transport)
    before = greedy(llm)
    with joined(llm, new) as far:
        torch.cuda.empty_cache()
        hoard = []
        for size in (1 << 30, 1 << 24):
            while True:
                try:
                    hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda:0"))
                except torch.OutOfMemoryError:
                    break
        # Enough for a step, too little for two embeddings.
        del hoard[-3:]
        torch.cuda.empty_cache()
        with pytest.raises(InflightError, match="memory") as refusal:
            # Its embedding fits into no bucket, and its place is not known yet.
            far.send(new)
        print(f"\n{refusal.value}")
        assert greedy(llm) == before
    hoard.clear()
    torch.cuda.empty_cache()
    with joined(llm, new) as far:
        far.send(new)
        assert greedy(llm) == fresh
