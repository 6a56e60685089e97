"""Sleep of two tensor-parallel ranks: memory is freed, and weights return."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.probe import greedy
from tests.support.gpu.memory import taken
from tests.support.gpu.ranked import (  # noqa: F401 (a fixture)
    start,
)
from vllm.inflight.errors import EngineAsleep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHAPE = {"hidden": 2048, "layers": 4, "vocab": 32000}
MIB = 1 << 20
KV_BYTES = 2048 * MIB
ROUNDS = 5


def held_bytes(llm: Any) -> list[int]:
    """What each rank holds, but for what torch keeps, which a sleep makes it let go."""
    return llm.collective_rpc(lambda _: taken())


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "graphs"])
def two(
    request: pytest.FixtureRequest,
    start: Callable[..., Any],  # noqa: F811
) -> Callable[..., Any]:
    return partial(start, enforce_eager=request.param, kv_cache_memory_bytes=KV_BYTES)


@pytest.fixture(scope="module")
def fresh(two: Callable[..., Any], new: Path) -> list[list[int]]:
    return greedy(two(new))


@pytest.fixture(scope="module")
def llm(two: Callable[..., Any], fresh: Any, old: Path) -> Any:
    return two(old, enable_sleep_mode=True)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_the_memory_of_both_ranks_and_a_wake_up_takes_it_again(
    llm: Any, old: Path, level: int
) -> None:
    before, awake = greedy(llm), held_bytes(llm)
    llm.sleep(level=level)
    for held, then in zip(held_bytes(llm), awake, strict=True):
        assert then - held > KV_BYTES + 250 * MIB  # two sets of half the weights
    with pytest.raises(EngineAsleep):
        llm.update_weights_from_disk(str(old), "asleep")
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.update_weights_from_disk(str(old), "old")
    llm.wake_up(tags=["kv_cache"])
    for held, then in zip(held_bytes(llm), awake, strict=True):
        assert abs(held - then) < 512 * MIB
    assert greedy(llm) == before


def test_rounds_of_sleep_and_updates_equal_a_fresh_engine(
    llm: Any, old: Path, new: Path, fresh: list[list[int]]
) -> None:
    before = greedy(llm)
    assert before != fresh
    for number in range(ROUNDS):
        path, said = ((new, fresh), (old, before))[number % 2]
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        assert llm.weight_info()["weights"] == "gone"
        llm.update_weights_from_disk(str(path), f"round-{number}")
        llm.wake_up(tags=["kv_cache"])
        assert greedy(llm) == said
    llm.update_weights_from_disk(str(old), "in flight")
    assert greedy(llm) == before
    llm.rollback_weights()
    assert greedy(llm) == fresh
