"""A trainer of the same host lends its tensors, from another GPU and from the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.far_trainer import FarTrainer, sends_and_rollbacks
from tests.support.engines.probe import greedy
from vllm.inflight.transport.cuda_ipc.driver import CudaMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SHAPE = {"hidden": 1024, "layers": 4, "vocab": 20000}
SMALL = {"bucket_bytes": 1 << 20, "chunk_bytes": 1 << 22}
"""So that the embedding is larger than a bucket, and an update is many calls."""
needs_two = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="another GPU is needed for the trainer"
)


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start(
        old,
        weight_transfer_config=WeightTransferConfig(backend="inflight_ipc"),
    )


def test_settling_waits_for_writes_on_every_stream_of_the_lender() -> None:
    lent = torch.zeros(1 << 20, device=f"cuda:{torch.cuda.device_count() - 1}")
    written = torch.cuda.Event()
    with torch.cuda.device(lent.device), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000_000)
        lent.fill_(1)
        written.record()
    assert not written.query()
    CudaMemory().settle({lent.device})
    assert written.query()


@pytest.mark.parametrize("options", [{}, SMALL], ids=["at_once", "in_small_pieces"])
@pytest.mark.parametrize("gpu", [pytest.param(-1, marks=needs_two), 0])
def test_tensors_over_cuda_ipc_equal_a_fresh_engine(
    llm: Any,
    fresh: list[list[int]],
    old: Path,
    new: Path,
    gpu: int,
    options: dict[str, int],
) -> None:
    before = greedy(llm)
    assert before != fresh
    with FarTrainer(llm, "inflight_ipc", old, gpu=gpu, **options) as far:
        sends_and_rollbacks(far, llm, ((new, fresh), (old, before)) * 2)


def test_a_trainer_killed_in_the_middle_costs_nothing_but_its_update(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    before = greedy(llm)
    with FarTrainer(llm, "inflight_ipc", old, **SMALL) as far:
        far.send(old)
        sending = far.fall_silent(new)
        far.kill()
        with pytest.raises(EOFError):
            sending.result(timeout=60)
        # What it lent is still mapped, and nobody waits for it.
        assert greedy(llm) == before
        llm.abort_weight_update()
    assert greedy(llm) == before
    with FarTrainer(llm, "inflight_ipc", new) as far:
        far.send(new)
    assert greedy(llm) == fresh
    llm.rollback_weights()
    assert greedy(llm) == before
