"""A publisher on one of a trainer's ranks, the others gathering with it."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.trainers.fake_engine import UPDATE, publisher
from vllm.inflight.trainer.sources.stream import tensors

pytestmark = pytest.mark.seconds

PATIENCE = timedelta(seconds=120)


def join(rank: int, store: Path) -> None:
    place = {"rank": rank, "world_size": 2, "timeout": PATIENCE}
    dist.init_process_group("gloo", init_method=f"file://{store}", **place)


def gathered() -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor that all ranks have to ask for at the same time."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    yield "a", tensor


def other_rank(store: Path) -> None:
    join(1, store)
    for _ in range(3):
        for _ in tensors(gathered):
            pass
    dist.destroy_process_group()  # or gloo's threads may abort an exit they outlast


def test_a_publish_that_is_skipped_gathers_with_the_other_ranks(engine, tmp_path):
    store = tmp_path / "store"
    other = multiprocessing.get_context("spawn").Process(
        target=other_rank, args=(store,)
    )
    other.start()
    join(0, store)
    try:
        engine.held[UPDATE] = threading.Event()
        with publisher(engine, gathered, on_busy="skip") as to:
            first = to.publish(block=False)
            assert to.publish().skipped
            engine.held[UPDATE].set()
            assert not first.result().skipped
            assert not to.publish().skipped
        other.join(PATIENCE.seconds)
        assert other.exitcode == 0
    finally:
        dist.destroy_process_group()
        other.kill()
        other.join()
