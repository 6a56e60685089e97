"""Tensor parallelism on GPUs: both ranks flip together, under CUDA graphs and load."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import flips_under_load, greedy
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)
from vllm.inflight.errors import TransferFault, WeightsMismatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = {"hidden": 1024, "layers": 4}
NUM_FLIPS = 50
# NCCL wants a GPU for each end; memory is lent on an engine's own GPU as well.
BACKEND = "inflight_nccl" if torch.cuda.device_count() > 2 else "inflight_ipc"


@pytest.fixture(scope="module")
def two(start: Callable[..., Any]) -> Callable[[Path], Any]:  # noqa: F811
    def llm(folder: Path) -> Any:
        from vllm.config.weight_transfer import WeightTransferConfig

        transport = WeightTransferConfig(backend=BACKEND)
        return start(folder, enforce_eager=False, weight_transfer_config=transport)

    return llm


@pytest.fixture(scope="module")
def fresh(two: Callable[[Path], Any], new: Path) -> list[list[int]]:
    return greedy(two(new))


@pytest.fixture(scope="module")
def llm(two: Callable[[Path], Any], fresh: Any, old: Path) -> Any:
    return two(old)


def test_two_ranks_equal_a_fresh_engine_after_many_flips_under_load(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    before = greedy(llm)
    assert before != fresh
    _, seconds = flips_under_load(llm, (new, old), NUM_FLIPS)
    print(f"\nflip of two ranks: {1e3 * median(seconds):.3f} ms")
    assert greedy(llm) == before
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == before


def trainer(llm: Any, folder: Path) -> FarTrainer:
    options = {"gpu": -1, "num_workers": 2, "bucket_bytes": 1 << 20}
    return FarTrainer(llm, BACKEND, folder, **options)


def test_two_ranks_take_updates_from_a_trainer(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    llm.update_weights_from_disk(str(old), "old")
    before = greedy(llm)
    with trainer(llm, new) as far:
        for folder, expected in ((new, fresh), (old, before)) * 2:
            far.send(folder)
            assert greedy(llm) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="the trainer needs a third")
def test_two_ranks_survive_the_death_of_their_trainer(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    llm.update_weights_from_disk(str(old), "old")
    before = greedy(llm)
    with trainer(llm, new) as far:
        sending = far.fall_silent(new)
        assert greedy(llm) == before
        far.kill()
        with pytest.raises(TransferFault):
            sending.result(timeout=60)
    assert greedy(llm) == before
    with trainer(llm, new) as far:
        far.send(new)
        assert greedy(llm) == fresh


def test_an_incomplete_version_is_served_by_no_rank(
    llm: Any,
    old: Path,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    llm.update_weights_from_disk(str(old), "old")
    before = greedy(llm)
    tensors = load_file(old / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsMismatch, match=r"layers\.1\.mlp\.down_proj"):
        llm.update_weights_from_disk(str(tmp_path), "short")
    assert greedy(llm) == before
