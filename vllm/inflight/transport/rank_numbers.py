"""How workers are numbered: within their engine, and among all that a trainer sees.

vLLM numbers a worker with `ParallelConfig.rank`. In vLLM's own processes that is its
number within its engine. Under an external launcher (torchrun) it is the launcher's
RANK, which counts the processes of all engines. Whatever belongs to one engine is
indexed by `rank_in_engine`, and by nothing else.
"""

from __future__ import annotations

from typing import Any


def rank_in_engine(parallel: Any) -> int:
    """The number of this worker among the ranks of its engine, from 0.

    Args:
        parallel: vLLM's `ParallelConfig`, as a worker has it.

    """
    rank: int = parallel.rank % parallel.world_size
    return rank


def worker_index(parallel: Any) -> int:
    """The number of this worker among all workers that a trainer reaches, from 0.

    It is the number that vLLM's own backends use: data-parallel engines one after
    another, and under an external launcher the processes of that launcher. A trainer
    adds its `rank_offset` to it.
    """
    index: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
    return index


def own_entry(entries: list[Any], parallel: Any) -> int | None:
    """Which of `entries`, one for each worker in order, is this worker's.

    Under an external launcher a list may be of all its processes, or of one engine.

    Returns:
        the index; None if the list has no entry for this worker.

    """
    of_engine = parallel.data_parallel_index * parallel.world_size
    for index in (worker_index(parallel), of_engine + rank_in_engine(parallel)):
        if index < len(entries):
            return index
    return None
