"""Every example runs on one GPU as it is, and shows what it promises there, too."""

import os

import pytest
import torch

from tests.e2e.test_examples import (  # noqa: F401 (tests, run here on a GPU)
    test_a_stream_is_paused_and_goes_on,
    test_a_trainer_process_and_a_server_over_http,
    test_an_async_llm_streams_while_a_trainer_publishes,
    test_requests_outlive_the_turns_of_a_trainer,
    test_the_example_with_a_trainer_and_an_llm_in_one_script_learns,
    test_the_hybrid_engine_example_learns_or_says_that_it_needs_a_gpu,
    test_the_partial_rollout_example_reports_the_ratios_of_each_version,
    test_upstreams_trainer_interface_and_a_server_over_http,
)

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show each example one GPU, however many there are."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)


@pytest.mark.skipif(NUM_GPUS < 2, reason="NCCL needs a GPU for each end")
def test_upstreams_trainer_interface_over_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()  # the example sees all GPUs
    test_upstreams_trainer_interface_and_a_server_over_http()
