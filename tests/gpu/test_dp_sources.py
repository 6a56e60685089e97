"""Two data-parallel engines of a dense model, fed by files and by memory that is lent.

Each has a GPU of its own. What every rank serves is compared, and not its tokens alone.
"""

from pathlib import Path

import pytest
import torch

from tests.e2e.test_fed_engines import feed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = {"hidden": 1024, "layers": 4, "vocab": 20000}
"""So that an update is many buckets."""


def test_both_engines_serve_the_weights_from_files_and_from_a_trainer(
    old: Path, new: Path
) -> None:
    feed("two_engines", old, new, "files", "inflight_ipc")


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="the trainer needs a third")
def test_both_engines_serve_the_weights_from_a_trainer_over_nccl(
    old: Path, new: Path
) -> None:
    feed("two_engines", old, new, "inflight_nccl")
