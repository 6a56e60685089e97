"""The pace of the staging thread: on which cores it runs, and when it rests.

On a GPU, staging shares the memory bandwidth with decoding. So the thread rests in
proportion to the bytes it has written. The rest of this text is about the CPU.

There, staging shares a process with decoding, and so the interpreter's lock. A low
priority would do harm: a thread that is descheduled while it holds the lock blocks
decoding until it runs again, on a busy machine for seconds. So the thread keeps the
normal priority and stays off the cores that decoding is bound to. After every tensor
during which a step ran, it rests as long as its share of a core requires.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from vllm.inflight.config import InflightConfig
from vllm.inflight.packed import SLICE_S
from vllm.inflight.worker.model.kinds.cpu_packing import set_threads
from vllm.inflight.worker.step_tracker import StepTracker

LONGEST_REST_S = 0.25
"""The longest rest. The remainder is kept for later, so an abort ends soon."""

SHORTEST_NAP_S = 0.0005
"""Shorter sleeps are inexact; they are added up until they reach this."""

BREAK_S = 4 * SLICE_S
"""Length of a break after a slice of Python.

Every call of torch releases the interpreter's lock, so a step takes longer by the
Python that other threads run meanwhile.
"""

IDLE_S = 0.25
"""The engine counts as idle when no step has followed within this time."""

undirected = torch._C.DisableTorchFunction
"""Context: torch's default device has no effect.

Loaders need a default device. While it is set, every call of torch, even for the size
of a tensor, goes through Python and takes four times as long. Our code names its
devices.
"""


def pace_of(
    config: InflightConfig, device: torch.device, steps: StepTracker, num_threads: int
) -> Throttle | DeviceThrottle:
    """The pace of one update on a device.

    Args:
        config: of the engine.
        device: the device that decodes.
        steps: the steps of this worker.
        num_threads: threads that may copy, where shadow weights of a GPU are on the
            host.

    """
    if device.type == "cpu":
        return Throttle(config.stage_share, steps)
    is_on_host = config.staging == "host"
    num_threads_there = num_threads if is_on_host else None
    return DeviceThrottle(config.stage_gb_per_s, steps, num_threads_there)


class _AnyThrottle:
    """The breaks and the deadline of an update, on any device."""

    _hurry_at = math.inf
    _decodes_until = -math.inf

    def __init__(self, steps: StepTracker) -> None:
        self._steps = steps
        self._num_begun = steps.num_begun

    def hurry_after(self, seconds: float) -> None:
        """Rest no more after `seconds`: a late update is a failed update."""
        self._hurry_at = time.monotonic() + seconds

    def take_break(self) -> None:
        """Let decoding have the interpreter for `BREAK_S`, if the engine decodes."""
        now = time.monotonic()
        begun = self._steps.num_begun
        if begun != self._num_begun or begun != self._steps.num_ended:
            self._num_begun, self._decodes_until = begun, now + IDLE_S
        if now < min(self._decodes_until, self._hurry_at):
            time.sleep(BREAK_S)


class DeviceThrottle(_AnyThrottle):
    """The pace of an update into a GPU; used by the staging thread."""

    def __init__(
        self, gb_per_s: float, steps: StepTracker, num_threads: int | None = None
    ) -> None:
        super().__init__(steps)
        self._num_threads = num_threads
        self._seconds_per_byte = 1 / (gb_per_s * 1e9)
        self._num_bytes = 0
        self._over_at = 0.0

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Context: torch's copies on the host get the threads that upstream denies."""
        own = torch.get_num_threads()
        if self._num_threads is not None:
            set_threads(self._num_threads)
        try:
            yield
        finally:
            if self._num_threads is not None:
                set_threads(own)

    def rest(self, num_bytes: int) -> None:
        """Rest until the time for all bytes so far is over.

        Args:
            num_bytes: all bytes of the update so far.

        """
        fresh, self._num_bytes = num_bytes - self._num_bytes, num_bytes
        now = time.monotonic()
        # Unused time is not made up for: that would be a burst.
        self._over_at = max(now, self._over_at + fresh * self._seconds_per_byte)
        if self._over_at - now > SHORTEST_NAP_S and now < self._hurry_at:
            time.sleep(self._over_at - now)


class Throttle(_AnyThrottle):
    """The pace of an update on a CPU; used by the staging thread."""

    def __init__(self, share: float, steps: StepTracker) -> None:
        super().__init__(steps)
        self._rest_per_second = 1 / share - 1
        self._num_ended = steps.num_ended
        self._owed = 0.0
        self._worked = 0.0

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Context: this thread runs on the cores that decoding leaves free, with one
        torch thread.

        The thread ends with its update, so nothing is restored.
        """
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.sched_setaffinity(0, free_cores())
        set_threads(1)
        self._look()
        yield

    def rest(self, num_bytes: int) -> None:
        """Rest for the work since the last rest, if a step ran meanwhile."""
        del num_bytes  # on a CPU, time counts
        self._owed += (time.thread_time() - self._worked) * self._rest_per_second
        if self._steps.num_begun == self._num_ended:
            # Between two steps, decoding may only be waiting for the lock. The debt is
            # kept, up to the longest rest.
            self._owed = min(self._owed, LONGEST_REST_S)
        elif time.monotonic() < self._hurry_at:
            nap = min(self._owed, LONGEST_REST_S)
            time.sleep(nap)
            self._owed -= nap
        self._look()

    def _look(self) -> None:
        """Record the CPU time of this thread, and the number of ended steps."""
        self._worked, self._num_ended = time.thread_time(), self._steps.num_ended


def free_cores() -> set[int]:
    """The cores of this engine that no thread of this process is bound to; if none,
    all.

    Upstream binds the threads of a CPU worker before its first line of Python runs. So
    the cores of the parent process are asked for.
    """
    parent = multiprocessing.parent_process()
    cores = os.sched_getaffinity(0 if parent is None else parent.pid or 0)
    bound: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            bound |= os.sched_getaffinity(int(thread))
    return cores - bound or cores
