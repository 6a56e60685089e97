"""Two ranks on GPUs end with their engine core, whatever they wait for."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from tests.robustness.injection.conftest import (  # noqa: F401 (a fixture)
    trap,
)
from tests.robustness.injection.points import Trap
from tests.robustness.injection.test_killed import (  # noqa: F401 (one is a test, run here too)
    NUM_TOKENS,
    Answer,
    are_gone,
    says,
    test_a_rank_stuck_in_a_step_ends_with_its_engine_core,
)
from tests.support.serving import Server
from tests.support.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

FLAGS = {
    "--tensor-parallel-size": 2,
    "--gpu-memory-utilization": 0.05,
    "--kv-cache-memory-bytes": 1 << 30,
}


@pytest.fixture
def server(trap: Trap, old: Path) -> Iterator[Server]:  # noqa: F811
    words = [str(word) for flag in FLAGS.items() for word in flag]
    with Server(old, *words) as running:
        yield running


def test_ranks_end_with_a_core_that_is_killed_while_they_decode(server: Server) -> None:
    family = psutil.Process(server.pid).children(recursive=True)
    (core,) = [each for each in family if "EngineCore" in " ".join(each.cmdline())]
    answers: list[Answer] = []
    with ThreadPoolExecutor(1) as pool:
        speaking = pool.submit(says, server, answers)
        until(lambda: answers and len(answers[0].tokens) > 4, "it says nothing")
        core.kill()
        are_gone(family)
        speaking.result(timeout=60)
    assert len(answers[-1].tokens) < NUM_TOKENS
