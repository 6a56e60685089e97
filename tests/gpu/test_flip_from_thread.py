"""A flip on a GPU that another thread than the stepping one calls."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight.worker.shadow import swap
from vllm.inflight.worker.shadow.change_log import ChangeLog
from vllm.inflight.worker.staging.worker import Held, StagingWorker, Versions
from vllm.inflight.worker.step_tracker import StepTracker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CYCLES = 1_000_000_000
"""About half a second of a GPU's clock."""
DEVICE = torch.device("cuda", 0)
SIZE = 1 << 20
"""Elements of the weights; a swap changes all of them."""


def test_a_flip_waits_for_the_step_of_another_thread() -> None:
    steps = StepTracker(DEVICE)
    ended = torch.cuda.Event()

    def step() -> None:
        with steps.running(), torch.cuda.device(DEVICE):
            torch.cuda.set_stream(torch.cuda.Stream(DEVICE))  # as vLLM does
            torch.cuda._sleep(CYCLES)
            ended.record()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    torch.cuda.current_stream(DEVICE).synchronize()
    assert not ended.query(), "this thread's stream knows nothing of it"
    with torch.cuda.stream(steps.stream):
        torch.cuda.current_stream(DEVICE).synchronize()
    assert ended.query()


class Rank:
    """A rank with a staged log, whose steps read the weights in a thread of their own.

    Attributes:
        stager: flips the weights; any thread may ask it to.
        old: the bits that are served at first.
        new: the bits that the log leads to.
        read: the bits that the last step has read.
        ended: the event that this step has ended on the GPU.

    """

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread
        self._live = torch.arange(SIZE, device=DEVICE).to(torch.int16)
        self.old, self.new = self._live.clone(), self._live ^ 0x2A55
        self.read = torch.zeros_like(self._live)
        self.ended = torch.cuda.Event()
        log = ChangeLog(DEVICE, 8 * SIZE)
        places = torch.arange(SIZE, device=DEVICE)
        log.add("weights", places, self._live, self.new)
        worker: Any = SimpleNamespace(device=DEVICE)
        shadow: Any = SimpleNamespace(device=DEVICE, log=log, is_reversible=True)
        self.stager = StagingWorker(worker, shadow)
        staged = Held(flip=swap.Swap(log, {"weights": self._live}))
        self.stager.versions = Versions(staged=staged)
        torch.cuda.synchronize()
        # CUDA loads a kernel at its first launch, which waits for all work on the GPU.
        self.step(cycles=1)
        for to in ("next", "undo"):
            self.stager.flip(to)

    def step(self, cycles: int) -> None:
        """Launch a step that reads the weights after so many cycles; do not wait."""
        self._thread.submit(self._step, cycles).result()

    def _step(self, cycles: int) -> None:
        with self.stager.steps.running():
            torch.cuda._sleep(cycles)
            torch.add(self._live, 0, out=self.read)
            self.ended.record()

    def has_read(self, bits: torch.Tensor) -> bool:
        """Whether the last step has read these bits; waits for its end."""
        self.ended.synchronize()
        return torch.equal(self.read, bits)


@pytest.fixture
def rank() -> Iterator[Rank]:
    def choose_stream() -> None:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))  # as vLLM does

    with ThreadPoolExecutor(1, initializer=choose_stream) as thread:
        yield Rank(thread)


def test_a_swap_comes_after_what_an_earlier_step_of_another_thread_reads(
    rank: Rank,
) -> None:
    versions = {"next": (rank.old, rank.new), "before": (rank.new, rank.old)}
    for to, (before, after) in versions.items():
        rank.step(CYCLES)
        assert not rank.ended.query(), "the step was to be late"
        rank.stager.flip(to)
        assert rank.ended.query()
        assert rank.has_read(before)
        rank.step(cycles=1)
        assert rank.has_read(after)


def test_a_swap_on_the_stream_of_its_caller_would_come_too_early(rank: Rank) -> None:
    """The test above finds it."""
    rank.step(CYCLES)
    rank.stager.steps.stream = None
    rank.stager.flip()
    assert not rank.ended.query()
    assert rank.has_read(rank.new)
