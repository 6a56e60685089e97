"""A flip on a GPU that another thread than the stepping one calls."""

import threading

import pytest
import torch

from vllm.inflight.worker.step_tracker import StepTracker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CYCLES = 1_000_000_000


def test_a_flip_waits_for_the_step_of_another_thread() -> None:
    device = torch.device("cuda:0")
    steps = StepTracker(device)
    ended = torch.cuda.Event()

    def step() -> None:
        with steps.running(), torch.cuda.device(device):
            torch.cuda.set_stream(torch.cuda.Stream(device))  # as vLLM does
            torch.cuda._sleep(CYCLES)
            ended.record()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    torch.cuda.current_stream(device).synchronize()
    assert not ended.query(), "this thread's stream knows nothing of it"
    with torch.cuda.stream(steps.stream):
        torch.cuda.current_stream(device).synchronize()
    assert ended.query()
