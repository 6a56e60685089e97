"""How workers are numbered, by their engine and by a trainer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.weight_transfer import nccl_common

from vllm.inflight.transport.rank_numbers import own_entry, rank_in_engine, worker_index


def parallel(rank: int, world_size: int, data_parallel_index: int = 0) -> Any:
    """As vLLM configures a worker of an engine of `world_size` ranks."""
    return SimpleNamespace(
        rank=rank, world_size=world_size, data_parallel_index=data_parallel_index
    )


LAUNCHED = parallel(3, 1)
"""The fourth process of a launcher, an engine of one rank."""


@pytest.mark.parametrize(
    ("worker", "rank", "index"),
    [
        (parallel(0, 1), 0, 0),
        (parallel(1, 2), 1, 1),
        (parallel(1, 2, data_parallel_index=2), 1, 5),
        (LAUNCHED, 0, 3),
    ],
)
def test_an_engine_counts_its_own_ranks_and_a_trainer_all_workers(worker, rank, index):
    assert (rank_in_engine(worker), worker_index(worker)) == (rank, index)


@pytest.mark.parametrize(
    ("worker", "num_entries", "index"),
    [
        (parallel(1, 2), 2, 1),
        (parallel(1, 2), 1, None),
        (parallel(1, 2, data_parallel_index=1), 4, 3),
        (parallel(1, 2, data_parallel_index=1), 2, None),
        (LAUNCHED, 4, 3),
        (LAUNCHED, 1, 0),
        (LAUNCHED, 0, None),
    ],
)
def test_a_list_has_entries_for_all_workers_or_for_one_launched_engine(
    worker, num_entries, index
):
    assert own_entry([{}] * num_entries, worker) == index


@pytest.mark.parametrize("worker", [parallel(1, 2, data_parallel_index=2), LAUNCHED])
def test_vllms_own_backends_count_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, worker: Any
) -> None:
    """A trainer's group has the same ranks whichever backend its workers have."""
    joined: list[int] = []
    monkeypatch.setattr(
        nccl_common,
        "stateless_init_process_group",
        lambda host, port, rank, *_, device: joined.append(rank),
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    info = nccl_common.NCCLWeightTransferInitInfo(
        master_address="here", master_port=1, rank_offset=1, world_size=9
    )
    nccl_common.worker_init_process_group(info, worker)
    assert joined == [1 + worker_index(worker)]
