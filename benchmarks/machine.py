"""The machine of a benchmark, and the load of other processes on it."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

GPUS = "CUDA_VISIBLE_DEVICES"
"""In the environment: which GPUs a process sees."""


def visible_gpus() -> list[str]:
    """The GPUs that this process sees, as the variable names them."""
    import torch

    every = [str(number) for number in range(torch.cuda.device_count())]
    named = os.environ.get(GPUS)
    return every if named is None else named.split(",")[: len(every)]


def facts() -> dict[str, Any]:
    """Facts of the machine that figures depend on."""
    import torch
    from vllm.version import __version__

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": __version__,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


@dataclass(frozen=True)
class Usage:
    """CPU seconds since some moment: of the whole machine, and of one family."""

    wall: float
    machine: float
    family: float

    @classmethod
    def now(cls, root: int) -> Usage:
        """The usage now; the family is process `root` and its descendants."""
        times = psutil.cpu_times()
        idle = times.idle + times.iowait
        # Guest time is in user time already.
        total = sum(times[: times._fields.index("guest")])
        family = 0.0
        parent = psutil.Process(root)
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                family += used.user + used.system
        return cls(total / os.cpu_count(), total - idle, family)

    def others(self, later: Usage) -> float:
        """Cores that other processes used, on average, between two moments."""
        foreign = (later.machine - self.machine) - (later.family - self.family)
        return max(0.0, foreign / (later.wall - self.wall))
