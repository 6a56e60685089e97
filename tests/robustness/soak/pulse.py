"""The pulse of a process and its children: what they hold, once a second.

What grows is told by the slope of the second half, fitted by least squares; the
first half is for allocators and caches to find their level. High values count: a
transport's buckets, or a process that was killed, come back after a while.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch

from tests.support import shared_memory

MIB = 1 << 20
INTERVAL_S = 1.0
NUM_WINDOWS = 8
"""Of the second half. Of each a high value counts, and not the highest: something may
be there for a moment."""
HIGH = 0.9
"""The share of a window's values that are no higher."""

VARIES_MIB = 24.0 if torch.cuda.is_available() else 12.0
"""By which memory varies by itself; a host with GPUs has more cores, and more heaps."""

FEW = 3.0
"""By which threads and descriptors vary: pools of libraries have more of them under
load. If each trainer that is killed left one behind, ten minutes would add more."""

LIMITS = {
    "memory_mib": (60.0, VARIES_MIB, 220.0),
    "gpu_mib": (60.0, 32.0, 100.0),
    "threads": (6.0, FEW, 100.0),
    "descriptors": (6.0, FEW, 100.0),
    "shared_files": (6.0, 1.5, 100.0),
}
"""What may be added in an hour; within the window, where that is short; and the seconds
of the window from which on it is judged: allocators need minutes to settle."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What all processes of a run hold at one time."""

    at_s: float
    memory_mib: float
    """Resident, of all together."""
    threads: int
    descriptors: int
    shared_files: int
    gpu_mib: float = 0.0
    """Used on the GPUs of the engine by these processes, or by all if the driver does
    not tell which has how much."""


def gpu_memory(num_gpus: int) -> Callable[[set[int]], float]:
    """How to ask what processes use of the first GPUs, in MiB.

    The driver is asked. Torch would take memory of a GPU for itself.
    """
    if not torch.cuda.is_available():
        return lambda family: 0.0
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    nvml.nvmlInit()
    numbers = map(current_platform.device_id_to_physical_device_id, range(num_gpus))
    gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]

    def used(family: set[int]) -> float:
        running = [nvml.nvmlDeviceGetComputeRunningProcesses(gpu) for gpu in gpus]
        shares = [p.usedGpuMemory for each in running for p in each if p.pid in family]
        if not shares or None in shares:
            shares = [nvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in gpus]
        return sum(shares) / MIB

    return used


class Pulse:
    """Beats of this process and its children.

    Args:
        num_gpus: of the engine.
        is_steady: whether all that holds memory is there; no beat is taken else.

    """

    def __init__(
        self, num_gpus: int = 1, is_steady: Callable[[], bool] = lambda: True
    ) -> None:
        self._root = psutil.Process()
        self._num_gpus, self._is_steady = num_gpus, is_steady
        self._began = time.monotonic()
        self._others = shared_memory.names()
        self.beats: list[Beat] = []
        self._resident: dict[str, list[tuple[float, float]]] = {}
        """Process → (seconds, MiB) at each beat."""

    async def run(self) -> None:
        """Take a beat every second, for ever."""
        while True:
            if self._is_steady():
                with suppress(psutil.NoSuchProcess):  # a trainer was killed meanwhile
                    beat = await asyncio.to_thread(self.take)
                    if self._is_steady():
                        self.beats.append(beat)
            await asyncio.sleep(INTERVAL_S)

    def take(self) -> Beat:
        """Look once."""
        family = [self._root, *self._root.children(recursive=True)]
        at_s = round(time.monotonic() - self._began, 3)
        resident = {p: p.memory_info().rss / MIB for p in family}
        for process, mib in resident.items():
            name = f"{process.name()} {process.pid}"
            self._resident.setdefault(name, []).append((at_s, mib))
        return Beat(
            at_s,
            sum(resident.values()),
            sum(p.num_threads() for p in family),
            sum(p.num_fds() for p in family),
            len(self.left_behind()),
            self._gpu_mib({p.pid for p in family}),
        )

    @cached_property
    def _gpu_mib(self) -> Callable[[set[int]], float]:
        """First asked for when the engine is there, which may be forked off."""
        return gpu_memory(self._num_gpus)

    def left_behind(self) -> set[str]:
        """Names in shared memory that came during the run and are nobody else's."""
        names = shared_memory.names() - self._others
        return names - self._open_elsewhere() if names else names

    def _open_elsewhere(self) -> set[str]:
        """Files in shared memory that processes of other runs have open."""
        ours = {self._root.pid, *(p.pid for p in self._root.children(recursive=True))}
        found: set[str] = set()
        for process in psutil.process_iter():
            if process.pid not in ours:
                with suppress(psutil.Error):
                    found |= {Path(file.path).name for file in process.open_files()}
        return found

    def by_process(self) -> dict[str, dict[str, float]]:
        """Resident MiB of each, and how it grew in the second half, per hour."""
        return {
            name: {
                "now_mib": round(points[-1][1], 1),
                "per_hour_mib": round(3600 * _slope(points[len(points) // 2 :]), 2),
            }
            for name, points in self._resident.items()
            if len(points) > 3
        }

    def slopes(self) -> dict[str, dict[str, float | bool]]:
        """Per hour, over the second half of the run, and whether that is too much."""
        half = self.beats[len(self.beats) // 2 :]
        window_h = (half[-1].at_s - half[0].at_s) / 3600
        found: dict[str, dict[str, float | bool]] = {}
        for name, (per_hour, least, judged_s) in LIMITS.items():
            points = [(b.at_s, float(asdict(b)[name])) for b in half]
            slope = 3600 * _slope(_high(points))
            limit = max(per_hour, least / window_h)
            found[name] = {
                "now": round(asdict(half[-1])[name], 1),
                "per_hour": round(slope, 2),
                "limit_per_hour": round(limit, 2),
                "is_judged": 3600 * window_h >= judged_s,
                "grows": slope > limit and 3600 * window_h >= judged_s,
            }
        return found


def _high(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A high value of each window, at the middle of the window."""
    first, last = points[0][0], points[-1][0]
    length = (last - first) / NUM_WINDOWS or 1.0
    windows: dict[int, list[float]] = {}
    for at, value in points:
        window = min(int((at - first) / length), NUM_WINDOWS - 1)
        windows.setdefault(window, []).append(value)
    return [
        (first + (w + 0.5) * length, sorted(values)[int(HIGH * (len(values) - 1))])
        for w, values in windows.items()
    ]


def _slope(points: list[tuple[float, float]]) -> float:
    """Of the line that is nearest to `points`, by least squares."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
