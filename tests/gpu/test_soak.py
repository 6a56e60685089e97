"""Two minutes of the long run on a GPU: CUDA graphs, sleep, NCCL and lent memory."""

from pathlib import Path

import pytest
import torch

from tests.robustness.soak.test_soak import soak

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not NUM_GPUS, reason="needs an NVIDIA GPU"),
]
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason="NCCL needs a GPU for each end")


@pytest.mark.parametrize(
    ("backend", "staging"),
    [
        pytest.param("inflight_nccl", "auto", marks=needs_two),
        ("inflight_ipc", "auto"),
        ("inflight_ipc", "delta"),
    ],
)
def test_two_minutes_of_updates_faults_and_sleep_lose_and_tear_nothing(
    tmp_path: Path, backend: str, staging: str
) -> None:
    found = soak(tmp_path, 2, backend, staging)
    assert found["turns"] and found["audits"] and found["updates"] > 30
