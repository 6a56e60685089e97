"""Trainers of frameworks on GPUs, with their packages' own senders and extensions.

OpenRLHF broadcasts over NCCL from a GPU of its own, verl lends a buffer on the engine's
GPU by CUDA IPC, and prime-rl names a folder. The engines decode with CUDA graphs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_adoption import check_two_ranks
from tests.e2e.test_framework_trainers import (  # noqa: F401 (a fixture)
    check,
    in_float32,
)
from tests.support.engines.probe import greedy
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Inductor would have float32 be less than that.
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
]

NUM_GPUS = torch.cuda.device_count()


def needs(num_gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(num_gpus > NUM_GPUS, reason=f"needs {num_gpus} GPUs")


@pytest.fixture(scope="module")
def fresh(
    start: Callable[..., Any],  # noqa: F811
    in_float32: list[Path],  # noqa: F811
) -> Callable[[int], list[list[int]]]:
    """What an engine of so many ranks says that was started on the new checkpoint."""
    said: dict[int, list[list[int]]] = {}

    def of(num_ranks: int) -> list[list[int]]:
        if num_ranks not in said:
            own = {"dtype": "float32", "enforce_eager": False}
            llm = start(in_float32[1], tensor_parallel_size=num_ranks, **own)
            said[num_ranks] = greedy(llm)
        return said[num_ranks]

    return of


@pytest.mark.parametrize(
    ("framework", "num_ranks", "pauses"),
    [
        ("verl", 1, "obey"),
        ("prime_rl", 1, "absorb"),
        pytest.param("openrlhf", 1, "obey", marks=needs(2)),
        pytest.param("verl", 2, "obey", marks=needs(2)),
        pytest.param("openrlhf", 2, "obey", marks=needs(3)),
    ],
)
def test_a_frameworks_own_trainer_updates_an_engine_under_load(
    in_float32: list[Path],  # noqa: F811
    fresh: Callable[[int], list[list[int]]],
    framework: str,
    num_ranks: int,
    pauses: str,
) -> None:
    check(in_float32, framework, num_ranks, pauses, fresh(num_ranks))


@needs(2)
def test_a_method_that_meets_ranks_that_decode_is_rejected_by_name(
    old: Path, new: Path
) -> None:
    check_two_ranks({"old": old, "new": new})
