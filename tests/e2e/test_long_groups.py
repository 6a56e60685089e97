"""Hundreds of updates in one group, and many groups of an engine, leave nothing behind.

Over gloo here; tests/gpu runs the same over NCCL.
"""

import os
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from vllm import SamplingParams

from benchmarks.gpu.memory import held_by
from benchmarks.gpu.nccl_groups import open_files
from tests.e2e.test_trainer_failures import engine  # noqa: F401 (a fixture)
from tests.robustness.soak.rank import held as held_of_groups
from tests.support.engines.far_trainer import FarTrainer
from tests.support.engines.probe import greedy, outputs_during
from tests.support.waiting import until
from vllm.inflight.errors import InflightError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MIB = 1 << 20
BUCKET_BYTES = 1 << 18
UPDATES = 200, 100
"""Until allocators have found their level, and in each of three rounds after that."""
GROUPS = 20, 10
KILLED = 5, 5
MEMORY = {"resident_mib": 24.0, "gpu_mib": 16.0, "tensors_mib": 4.0}
"""By which a round may grow. A leak of each update, or of each group, is larger, and
comes in every round; what an allocator keeps comes once."""
COUNTS = "threads", "descriptors", "groups", "open_groups", "undrained"


@pytest.fixture(scope="module")
def backend() -> str:
    return "inflight_gloo"


def held() -> dict[str, float]:
    """What this process holds, of the GPU that it decodes on as well."""
    found = held_of_groups()
    process = psutil.Process()
    found["resident_mib"] = process.memory_info().rss / MIB
    found["gpu_mib"] = 0.0
    if torch.cuda.is_available():
        found["gpu_mib"] = held_by({os.getpid()}) / MIB
    found["threads"], found["descriptors"] = process.num_threads(), process.num_fds()
    return found


def stays_flat(act: Callable[[int], None], first: int, each: int) -> None:
    """`act` so many times at first, and then three rounds, which leave nothing."""
    act(first)
    before = now = held()
    files = open_files()
    grown = []
    for _ in range(3):
        act(each)
        last, now = now, held()
        grown.append({name: round(now[name] - last[name], 2) for name in MEMORY})
    print(f"\n{before}\n{now}\n{grown}")
    for name, limit in MEMORY.items():
        assert min(round_[name] for round_ in grown) < limit, f"{name} grows: {grown}"

    def are_back() -> bool:
        counted = held()
        return all(counted[name] <= before[name] for name in COUNTS)

    came = open_files() - files
    until(are_back, f"{COUNTS} were {before}, and became {held()}; {came} came", 20)


def test_hundreds_of_updates_in_one_group_leak_nothing(
    llm: Any, fresh: list[list[int]], old: Path, new: Path, backend: str
) -> None:
    before = greedy(llm)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with FarTrainer(llm, backend, old, bucket_bytes=BUCKET_BYTES) as far:

        def update(count: int) -> None:
            def send_all() -> None:
                for index in range(count):
                    far.send((new, old)[index % 2])

            outputs_during(send_all, llm, 4, repeat(params))

        stays_flat(update, *UPDATES)
        assert greedy(llm) == before
        far.send(new)
        assert greedy(llm) == fresh


def test_many_groups_one_after_another_leak_nothing(
    llm: Any, fresh: list[list[int]], old: Path, new: Path, backend: str
) -> None:
    with FarTrainer(llm, backend, old, bucket_bytes=BUCKET_BYTES) as far:

        def open_groups(count: int) -> None:
            for index in range(count):
                far.join_again()
                far.send((old, new)[index % 2])

        stays_flat(open_groups, *GROUPS)
        assert greedy(llm) == fresh


def test_trainers_that_are_killed_one_after_another_leak_nothing(
    llm: Any, fresh: list[list[int]], old: Path, new: Path, backend: str
) -> None:
    def join() -> FarTrainer:
        return FarTrainer(llm, backend, old, bucket_bytes=BUCKET_BYTES)

    def lose(count: int) -> None:
        for _ in range(count):
            with join() as far:
                sending = far.fall_silent(new)
                far.kill()
                with pytest.raises(InflightError):
                    sending.result(60)

    stays_flat(lose, *KILLED)
    with join() as far:
        far.send(new)
        assert greedy(llm) == fresh


def test_the_leak_check_detects_memory_that_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def keep(count: int) -> None:
        kept.extend(torch.ones(MIB // 4) for _ in range(count))

    with pytest.raises(AssertionError, match="resident_mib grows"):
        stays_flat(keep, 1, 40)
