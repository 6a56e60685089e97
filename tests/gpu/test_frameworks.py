"""Trainers of frameworks on GPUs, with their packages' own transports and extensions.

OpenRLHF broadcasts over NCCL from a GPU of its own. verl and checkpoint-engine lend a
buffer on the engine's GPU by CUDA IPC, and OpenRLHF's colocated trainer lends each
tensor. prime-rl names a folder. The engines decode with CUDA graphs.
"""

from pathlib import Path

import pytest
import torch

from benchmarks.frameworks.trainer import SENDERS
from tests.e2e.test_adoption import check_two_ranks
from tests.e2e.test_framework_trainers import (  # noqa: F401 (a fixture)
    FRAMEWORKS,
    Seen,
    check,
    check_fresh,
    check_late,
    in_float32,
    run,
)
from tests.support.gpu.exact import exact_products  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # Inductor would have float32 be less than that.
    pytest.mark.filterwarnings("ignore:TensorFloat32"),
    pytest.mark.usefixtures("exact_products"),
]

NUM_GPUS = torch.cuda.device_count()
ON_ONE_GPU = [name for name in FRAMEWORKS if SENDERS[name].is_beside]


def needs(num_gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(num_gpus > NUM_GPUS, reason=f"needs {num_gpus} GPUs")


@pytest.fixture(scope="module")
def of_one_rank(in_float32: list[Path]) -> Seen:  # noqa: F811
    """OpenRLHF's trainer has a GPU of its own."""
    return run(in_float32, 1, FRAMEWORKS if NUM_GPUS > 1 else ON_ONE_GPU)


@pytest.mark.parametrize(
    "framework", [*ON_ONE_GPU, pytest.param("openrlhf", marks=needs(2))]
)
def test_a_frameworks_own_trainer_updates_an_engine_under_load(
    in_float32: list[Path],  # noqa: F811
    of_one_rank: Seen,
    framework: str,
) -> None:
    check(of_one_rank, framework, in_float32)


def test_checkpoint_engines_own_server_updates_an_engine_under_load(
    in_float32: list[Path],  # noqa: F811
) -> None:
    framework = "checkpoint_engine"
    check(run(in_float32, 1, [framework]), framework, in_float32)


def test_tokens_after_an_update_are_those_of_a_fresh_engine(
    in_float32: list[Path],  # noqa: F811
    of_one_rank: Seen,
) -> None:
    check_fresh(of_one_rank, in_float32, num_ranks=1)


@needs(2)
def test_a_trainer_that_is_late_fails_alone(of_one_rank: Seen) -> None:
    """It stands in a broadcast of NCCL meanwhile, which cannot be cancelled."""
    check_late(of_one_rank)


@needs(2)
def test_trainers_update_two_ranks_under_load(
    in_float32: list[Path],  # noqa: F811
) -> None:
    """With three GPUs OpenRLHF's group is one of NCCL beside that of the ranks."""
    frameworks = ["openrlhf"] * (NUM_GPUS > 2) + ON_ONE_GPU
    seen = run(in_float32, 2, frameworks)
    for framework in frameworks:
        check(seen, framework, in_float32, num_ranks=2)
    check_fresh(seen, in_float32, num_ranks=2)


@needs(2)
def test_a_method_that_meets_ranks_that_decode_is_rejected_by_name(
    in_float32: list[Path],  # noqa: F811
) -> None:
    """In float32, as tokens are compared with those of a batch of another size."""
    check_two_ranks(dict(zip(("old", "new"), in_float32, strict=True)))
