"""Flips under CUDA graphs, torch.compile, async scheduling and FlashAttention."""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.e2e.test_executors import (  # noqa: F401 (a test, run here on a GPU)
    test_a_worker_with_a_process_of_its_own_takes_versions_and_deltas,
)
from tests.support.engines.probe import (
    commits_and_rollbacks,
    flips_under_load,
    greedy,
)
from vllm.inflight.errors import NothingToRollBack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 256, "layers": 4}
NUM_FLIPS = 60


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], new: Path) -> list[list[int]]:
    return greedy(start(new, enforce_eager=False))


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], fresh: Any, old: Path) -> Iterator[Any]:
    yield start(old, enforce_eager=False)


def test_outputs_equal_a_fresh_engine_after_every_flip_and_rollback(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    commits_and_rollbacks(llm, old, new, fresh)


def test_flips_under_load_leave_every_request_whole(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    _, seconds = flips_under_load(llm, (new, old), NUM_FLIPS)
    print(f"flip: {1e3 * median(seconds):.3f} ms median")
    llm.update_weights_from_disk(str(new), "last")
    assert greedy(llm) == fresh


def test_a_reload_of_upstream_can_be_a_rollback_target(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    llm.update_weights_from_disk(str(old), "old")
    before = greedy(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)})
    assert greedy(llm) == fresh
    with pytest.raises(NothingToRollBack):
        llm.rollback_weights()
    llm.update_weights_from_disk(str(old), "again")
    assert greedy(llm) == before
    llm.rollback_weights()
    assert greedy(llm) == fresh


@pytest.mark.parametrize("staging", ["host", "device"])
def test_every_place_for_the_second_set_gives_the_same(
    start: Callable[..., Any],
    fresh: list[list[int]],
    old: Path,
    new: Path,
    staging: str,
) -> None:
    inflight = {"staging": staging}
    llm = start(old, enforce_eager=False, additional_config={"inflight": inflight})
    before = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    assert greedy(llm) == fresh
    if staging == "device":
        llm.rollback_weights()
        assert greedy(llm) == before
    else:
        with pytest.raises(Exception, match="not kept"):
            llm.rollback_weights()
