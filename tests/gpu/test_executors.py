"""Ray's executors on two GPUs: as vLLM starts them, whatever its ranks hand on."""

import pytest
import torch

from tests.e2e.test_executors import (  # noqa: F401 (tests, run here on GPUs)
    paths,
    seen,
    test_every_step_of_24_commits_under_load_on_ray_is_of_one_version,
    test_every_step_on_ray_without_a_commit_is_of_the_version_served,
    test_no_rank_on_ray_commits_an_update_that_one_rank_rejects,
    test_rays_ranks_commit_together_and_roll_back,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
