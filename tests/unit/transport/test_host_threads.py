"""How many threads one rank's work on an update may take of its host."""

import os
from types import SimpleNamespace

import pytest
import torch

from vllm.inflight.transport.host_threads import MAX_THREADS, num_threads


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "engines", "expected"),
    [
        ("cpu", 64, 1, 1, 1),
        ("cuda", 64, 1, 1, MAX_THREADS),
        ("cuda", 64, 8, 1, 4),
        ("cuda", 64, 2, 8, 2),
        ("cuda", 64, 8, 0, 4),  # this node has a front end, and no engine
        ("cuda", 8, 1, 1, 4),
        ("cuda", 2, 8, 1, 1),
    ],
)
def test_a_rank_takes_half_of_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    cores: int,
    ranks: int,
    engines: int,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    parallel = SimpleNamespace(local_world_size=ranks, data_parallel_size_local=engines)
    assert num_threads(torch.device(device), parallel) == expected
