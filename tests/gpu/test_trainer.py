"""A trainer on another GPU: received in place, in slices, killed, silent.

One engine, in this process; whatever happens to the trainer, decoding goes on, the
weights served stay what they were, and the next update works.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_trainer_failures import (  # noqa: F401 (tests, run here over NCCL)
    test_a_pause_does_not_wait_for_a_trainer_that_fell_silent,
    test_a_trainer_killed_in_the_middle_costs_nothing_but_its_update,
    trainer,
)
from tests.support.engines.far_trainer import FarTrainer, sends_and_rollbacks
from tests.support.engines.probe import greedy
from vllm.inflight.transport.buckets.receiver import Incoming

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason="needs two GPUs, one for the trainer"
    ),
]

SHAPE = {"hidden": 1024, "layers": 4, "vocab": 20000}
BUCKET_BYTES = 1 << 20
"""Small, so that the embedding is larger and half an update is many buckets."""


@pytest.fixture(scope="module")
def engine(start: Callable[..., Any], fresh: Any, old: Path) -> Any:
    from vllm.config.weight_transfer import WeightTransferConfig

    transport = WeightTransferConfig(backend="inflight_nccl")
    return start(old, weight_transfer_config=transport)


@pytest.fixture(scope="module")
def backend() -> str:
    return "inflight_nccl"


def joined(llm: Any, folder: Path, **options: Any) -> FarTrainer:
    return FarTrainer(
        llm, "inflight_nccl", folder, bucket_bytes=BUCKET_BYTES, **options
    )


def test_updates_over_nccl_are_received_in_place_and_equal_a_fresh_engine(
    llm: Any,
    fresh: list[list[int]],
    old: Path,
    new: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placed: list[str] = []
    into = Incoming.into

    def told(self: Incoming, place: Any) -> None:
        def known(name: str, *form: Any) -> Any:
            found = place(name, *form)
            placed.extend([name] * (found is not None))
            return found

        into(self, known)

    monkeypatch.setattr(Incoming, "into", told)
    before = greedy(llm)
    assert before != fresh
    with joined(llm, old) as far:
        sends_and_rollbacks(far, llm, ((new, fresh), (old, before)) * 3)
    assert "model.embed_tokens.weight" in placed
    assert "model.layers.3.self_attn.q_proj.weight" in placed


def test_slices_over_nccl_are_put_together_and_equal_a_fresh_engine(
    llm: Any, fresh: list[list[int]], old: Path, new: Path
) -> None:
    llm.update_weights_from_disk(str(old), "old")
    before = greedy(llm)
    with joined(llm, old, num_slices=3) as far:
        sends_and_rollbacks(far, llm, ((new, fresh), (old, before)) * 2)
