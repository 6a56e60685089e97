"""PipelineRL's group of several actors, each worker of which receives as its own rank.

Over NCCL where there is a GPU for each member, else over gloo.
"""

from pathlib import Path

import pytest
import torch

from tests.e2e.test_pipelinerl_actors import (  # noqa: F401 (tests, run here on GPUs)
    backend,
    test_the_ranks_of_an_actor_with_two_gpus_follow_those_of_the_first,
    test_the_second_actor_receives_beside_the_first,
    test_two_engines_are_the_actors_of_one_group,
)
from tests.support.engines.script import run_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="the trainer needs a third")
def test_both_ranks_of_the_first_actor_receive_over_nccl(old: Path, new: Path) -> None:
    seen = run_script("pipelinerl_actor", old, new, 0, "nccl")
    assert seen["differing"] == []
    assert seen["version 0"] == seen["version 2"] == seen["expected"] != seen["before"]
