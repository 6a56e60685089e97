"""How many host threads one rank may use for an update.

One thread reads and sums memory far slower than the host could: 6 GB/s were measured on
the host of an H100. The host of a GPU has idle cores. In a CPU engine, the cores
decode.
"""

from __future__ import annotations

import os

import torch

from vllm.inflight import upstream

MAX_THREADS = 8
"""With more threads, memory bandwidth is the limit."""


def num_threads(device: torch.device, parallel_config: upstream.ParallelConfig) -> int:
    """On a GPU's host, half of this rank's share of the cores, up to `MAX_THREADS`."""
    if device.type == "cpu":
        return 1
    num_engines = max(1, parallel_config.data_parallel_size_local)
    num_ranks = parallel_config.local_world_size * num_engines
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // (2 * num_ranks)))
