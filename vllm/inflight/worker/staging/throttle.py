"""The pace of a staging thread: where it runs, and when it rests.

On a GPU it shares the memory's bandwidth, so it rests from the bytes it has written.
What follows is about the CPU.

It shares a process with decoding, and so the interpreter's lock. That makes a low
priority the wrong modesty: a thread that is put aside while it holds the lock holds
decoding up until it is let on again, on a busy machine for seconds. So it keeps the
priority of everybody else, stays off the cores that decoding is bound to, and rests
after every tensor beside which a step ran, as long as its share of a core asks.
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
from vllm.inflight.worker.model.cpu_packing import set_threads
from vllm.inflight.worker.step_tracker import StepTracker

LONGEST_REST_S = 0.25
"""What is owed beyond it is rested after later tensors; a cancelled job ends soon."""

SHORTEST_NAP_S = 0.0005
"""A sleep is never exact; what is shorter than this waits until it adds up."""

BREAK_S = 4 * SLICE_S
"""How long a break is after a slice of Python: every call of torch gives the
interpreter's lock away, so a step lasts longer by what is done in others meanwhile."""

IDLE_S = 0.25
"""How long after a step the next one is expected; then the engine counts as idle."""

undirected = torch._C.DisableTorchFunction
"""Context: what is in it goes without torch's default device.

Loaders want one, and while it is set every call of torch, to the size of a tensor, goes
through Python, which takes four times as long. What is ours names its devices.
"""


def pace_of(
    config: InflightConfig, device: torch.device, steps: StepTracker, num_threads: int
) -> Throttle | DeviceThrottle:
    """The pace of one job on that device, beside those steps.

    Args:
        config: of the engine.
        device: that decodes.
        steps: of its decoding.
        num_threads: that may copy, where what is staged for a GPU is on the host.

    """
    if device.type == "cpu":
        return Throttle(config.stage_share, steps)
    is_on_host = config.staging == "host"
    num_threads_there = num_threads if is_on_host else None
    return DeviceThrottle(config.stage_gb_per_s, steps, num_threads_there)


class _AnyThrottle:
    """The breaks and the deadline of a job, on whichever device."""

    _hurry_at = math.inf
    _decodes_until = -math.inf

    def __init__(self, steps: StepTracker) -> None:
        self._steps = steps
        self._num_begun = steps.num_begun

    def hurry_after(self, seconds: float) -> None:
        """Rest no more once `seconds` have passed: a late update is a failed one."""
        self._hurry_at = time.monotonic() + seconds

    def take_break(self) -> None:
        """After a slice of Python, leave the interpreter to decoding for `BREAK_S`.

        Where nothing is decoded there is nobody to leave it to.
        """
        now = time.monotonic()
        begun = self._steps.num_begun
        if begun != self._num_begun or begun != self._steps.num_ended:
            self._num_begun, self._decodes_until = begun, now + IDLE_S
        if now < min(self._decodes_until, self._hurry_at):
            time.sleep(BREAK_S)


class DeviceThrottle(_AnyThrottle):
    """The pace of a job that writes to a GPU; called by its thread."""

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
        """Let torch's copies on the host have their threads: upstream leaves it one."""
        own = torch.get_num_threads()
        if self._num_threads is not None:
            set_threads(self._num_threads)
        try:
            yield
        finally:
            if self._num_threads is not None:
                set_threads(own)

    def rest(self, num_bytes: int) -> None:
        """Wait until the time of all bytes so far is over.

        Args:
            num_bytes: all bytes of the job so far.

        """
        fresh, self._num_bytes = num_bytes - self._num_bytes, num_bytes
        now = time.monotonic()
        # Time that was not used is not made up for: that would be a burst.
        self._over_at = max(now, self._over_at + fresh * self._seconds_per_byte)
        if self._over_at - now > SHORTEST_NAP_S and now < self._hurry_at:
            time.sleep(self._over_at - now)


class Throttle(_AnyThrottle):
    """The pace of one job on a CPU; called by its thread."""

    def __init__(self, share: float, steps: StepTracker) -> None:
        super().__init__(steps)
        self._rest_per_second = 1 / share - 1
        self._num_ended = steps.num_ended
        self._owed = 0.0
        self._worked = 0.0

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Move to the cores that decoding leaves, with one torch thread.

        The thread ends with its job, and with it all that was settled.
        """
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):
                os.sched_setaffinity(0, free_cores())
        set_threads(1)
        self._look()
        yield

    def rest(self, num_bytes: int) -> None:
        """Rest from what was done since the last rest, if a step ran meanwhile."""
        del num_bytes  # it is the time that counts
        self._owed += (time.thread_time() - self._worked) * self._rest_per_second
        if self._steps.num_begun == self._num_ended:
            # Between two steps, decoding may only be waiting for its turn: what is
            # owed is kept, but not more than can be rested at once.
            self._owed = min(self._owed, LONGEST_REST_S)
        elif time.monotonic() < self._hurry_at:
            nap = min(self._owed, LONGEST_REST_S)
            time.sleep(nap)
            self._owed -= nap
        self._look()

    def _look(self) -> None:
        """Note how far this thread and the steps are; one that runs has not ended."""
        self._worked, self._num_ended = time.thread_time(), self._steps.num_ended


def free_cores() -> set[int]:
    """Cores of this engine that no thread of this process is bound to, or all.

    Upstream binds the threads of a CPU worker before its first line of Python runs,
    so which cores there are is asked of the process that started it.
    """
    parent = multiprocessing.parent_process()
    cores = os.sched_getaffinity(0 if parent is None else parent.pid or 0)
    bound: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            bound |= os.sched_getaffinity(int(thread))
    return cores - bound or cores
