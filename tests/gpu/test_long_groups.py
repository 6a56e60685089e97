"""Hundreds of updates over NCCL in one group, and many groups, leave nothing behind.

Memory of GPU and host, threads, descriptors and communicators of the engine's process.
"""

import pytest
import torch

from tests.e2e.test_long_groups import (  # noqa: F401 (tests, run here over NCCL)
    test_hundreds_of_updates_in_one_group_leak_nothing,
    test_many_groups_one_after_another_leak_nothing,
    test_trainers_that_are_killed_one_after_another_leak_nothing,
)
from tests.e2e.test_trainer_failures import engine  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, one for the trainer"
    ),
]

SHAPE = {"hidden": 512, "layers": 4, "vocab": 8000}
"""So large that one version that is not let go of is seen."""


@pytest.fixture(scope="module")
def backend() -> str:
    return "inflight_nccl"
