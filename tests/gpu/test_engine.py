"""Flips under CUDA graphs, torch.compile, async scheduling and FlashAttention."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import checkpoint, start  # noqa: F401 (fixtures)
from tests.engine.probe import greedy, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 256, "layers": 4}
NUM_FLIPS = 60


@pytest.fixture(scope="module")
def old(checkpoint: Callable[..., Path]) -> Path:  # noqa: F811
    return checkpoint(0, **SHAPE)


@pytest.fixture(scope="module")
def new(checkpoint: Callable[..., Path]) -> Path:  # noqa: F811
    return checkpoint(1, **SHAPE)


@pytest.fixture(scope="module")
def fresh(start: Callable[..., Any], new: Path) -> list[list[int]]:  # noqa: F811
    return greedy(start(new, enforce_eager=False))


@pytest.fixture(scope="module")
def llm(start: Callable[..., Any], fresh: Any, old: Path) -> Iterator[Any]:  # noqa: F811
    yield start(old, enforce_eager=False)


def test_outputs_equal_a_fresh_engine_after_every_flip_and_rollback(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    before = greedy(llm)
    assert before != fresh
    for _ in range(3):
        llm.update_weights_from_disk(str(new), "new")
        assert greedy(llm) == fresh
        llm.rollback_weights()
        assert greedy(llm) == before
        llm.update_weights_from_disk(str(old), "old")
        assert greedy(llm) == before


def test_flips_under_load_leave_every_request_whole(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    from vllm import SamplingParams

    seconds: list[float] = []
    done = threading.Event()

    def commit_all() -> None:
        try:
            for number in range(NUM_FLIPS):
                path = (new, old)[number % 2]
                reply = llm.update_weights_from_disk(str(path), f"v{number}")
                seconds.append(reply["seconds"]["flip"])
        finally:
            done.set()

    committer = threading.Thread(target=commit_all)
    committer.start()
    outputs = []
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    while not done.is_set():
        outputs += llm.generate(prompts(8), params, use_tqdm=False)
    committer.join()
    assert len(seconds) == NUM_FLIPS
    print(f"flip: {1e3 * sorted(seconds)[len(seconds) // 2]:.3f} ms median")
    assert {len(o.outputs[0].token_ids) for o in outputs} == {200}
    assert sum(len(o.outputs[0].weight_versions) > 1 for o in outputs)
    llm.update_weights_from_disk(str(new), "last")
    assert greedy(llm) == fresh


@pytest.mark.parametrize("staging", ["host", "device"])
def test_every_place_for_the_second_set_gives_the_same(
    start: Callable[..., Any],  # noqa: F811
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
        with pytest.raises(Exception, match="not held"):
            llm.rollback_weights()
