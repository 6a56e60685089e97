"""Threads: how many of a host's cores one rank's work on an update may take.

One thread reads and sums memory far slower than a host can: 6 GB/s was measured on the
host of an H100. A GPU's host has cores to spare; those of a CPU decode.
"""

from __future__ import annotations

import os
from typing import Any

import torch

MOST = 8
"""More hardly help: the memory is the limit then."""


def num_threads(device: torch.device, parallel_config: Any) -> int:
    """Half of this rank's share of the cores, on the host of a GPU."""
    if device.type == "cpu":
        return 1
    num_engines = max(1, parallel_config.data_parallel_size_local)
    num_ranks = parallel_config.local_world_size * num_engines
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // (2 * num_ranks)))
