"""A trainer that knows torch.distributed alone, over NCCL, into a real engine core."""

import pytest
import torch

from tests.e2e.test_torch_groups import (  # noqa: F401 (tests, run here over NCCL)
    test_a_group_stays_usable_after_the_model_rejects_an_update,
    test_buckets_of_a_version_are_served_when_the_last_one_is_there,
    test_pipeline_stages_of_a_trainer_may_each_have_a_group,
    test_tokens_flow_while_a_version_is_broadcast,
    test_weights_that_a_trainer_broadcasts_are_served,
    trainer,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, one for the trainer"
    ),
]
