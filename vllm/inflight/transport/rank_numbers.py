"""How workers are numbered: within one engine, and among all workers of a trainer.

vLLM numbers a worker with `ParallelConfig.rank`. In processes that vLLM starts, this is
the worker's number within its engine. Under an external launcher (torchrun), it is the
launcher's RANK, which counts the processes of all engines. Data of one engine must be
indexed with `rank_in_engine` alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.inflight import upstream


def rank_in_engine(parallel: upstream.ParallelConfig) -> int:
    """The number of this worker among the ranks of its engine, from 0.

    Args:
        parallel: the worker's own configuration.

    """
    rank: int = parallel.rank % parallel.world_size
    return rank


def worker_index(parallel: upstream.ParallelConfig) -> int:
    """The number of this worker among all workers that a trainer reaches, from 0.

    vLLM's own backends use the same number: data-parallel engines follow one another,
    and under an external launcher the launcher's processes do. A worker's rank in a
    trainer's group is this number plus `rank_offset`.
    """
    index: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
    return index


def own_entry(
    entries: Sequence[object], parallel: upstream.ParallelConfig
) -> int | None:
    """The index of this worker's entry in a list with one entry per worker.

    Under an external launcher, the list may cover all its processes or one engine.

    Returns:
        the index, or None if the list has no entry for this worker.

    """
    of_engine = parallel.data_parallel_index * parallel.world_size
    for index in (worker_index(parallel), of_engine + rank_in_engine(parallel)):
        if index < len(entries):
            return index
    return None
