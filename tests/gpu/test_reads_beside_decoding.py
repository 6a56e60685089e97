"""Numbers are read from a GPU while another thread launches work on it."""

import threading
import time

import pytest
import torch

from vllm.inflight.ops.arriving import to_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CYCLES = 1 << 30
"""About half a second of a GPU's clock."""


def test_a_read_that_waits_for_a_kernel_keeps_no_other_thread_from_launching() -> None:
    numbers = torch.arange(1000, device="cuda")
    beside = torch.zeros(1, device="cuda")
    waits, found = threading.Event(), list[torch.Tensor]()

    def read() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(CYCLES)
            waits.set()
            found.append(to_host(numbers))

    # Page-locked memory is taken before, and CUDA loads each kernel at its first
    # launch, which waits for all work on the GPU.
    to_host(numbers)
    beside += 1
    torch.cuda.synchronize()
    thread = threading.Thread(target=read)
    thread.start()
    waits.wait()
    time.sleep(0.05)  # it waits now
    began = time.perf_counter()
    for _ in range(100):
        beside += 1
    took = time.perf_counter() - began
    was_waiting = thread.is_alive()
    thread.join()
    assert was_waiting and took < 0.1
    assert found[0].tolist() == list(range(1000)) and beside.item() == 101
