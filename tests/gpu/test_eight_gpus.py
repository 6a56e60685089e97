"""Eight GPUs: seven engines of one group, and four ranks fed from a trainer of four."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_fed_engines import feed
from tests.gpu.test_trainer_deltas import check_shards
from tests.support.engines.far_ranks import FarRanks
from tests.support.gpu.ranked import start  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 8, reason="needs eight GPUs"),
]

SHAPE = {"hidden": 256, "layers": 4}
STAGINGS: dict[str, dict[str, Any]] = {
    "device": {"staging": "device"},
    "delta": {"staging": "delta", "delta_gib": 0.2},
}


def test_seven_engines_serve_the_weights_from_one_trainer_over_nccl(
    old: Path, new: Path
) -> None:
    feed("seven_engines", old, new, "inflight_nccl")


@pytest.mark.parametrize("staging", STAGINGS)
def test_four_ranks_of_a_trainer_send_the_changes_of_their_shards_to_four_ranks(
    start: Callable[..., Any],  # noqa: F811
    old: Path,
    chain: list[Path],
    tmp_path: Path,
    staging: str,
) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig

    backend, size = "inflight_nccl", 4
    llm = start(
        old,
        tensor_parallel_size=4,
        enforce_eager=False,
        weight_transfer_config=WeightTransferConfig(backend=backend),
        additional_config={"inflight": STAGINGS[staging]},
    )
    store = tmp_path / "store"
    with FarRanks(llm, old, store, size, backend, "nccl", num_workers=4) as far:
        check_shards(llm, far, old, chain, size)
