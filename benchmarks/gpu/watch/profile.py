"""Where the staging thread's time goes, by functions.

`collective_rpc` calls `begin` and `end` in the engine's process. In between each phase
of an update runs under Python's profiler. Its clock is the thread's processor time:
waits for the interpreter and for the GPU are not in it. A framework's own call is
profiled with the clock on the wall, waits and all. The profiler makes calls of Python
slower, so the shares count, and not the sum.
"""

from __future__ import annotations

import cProfile
import functools
import io
import pstats
import time
from collections.abc import Callable
from typing import Any

from benchmarks.stopwatch import wrap

PHASES = {
    "worker.staging.thread:StagingThread._start": time.thread_time,
    "worker.staging.thread:StagingThread._receive": time.thread_time,
    "worker.staging.thread:StagingThread._prepare": time.thread_time,
    "worker.staging.thread:StagingThread._call_extension": time.perf_counter,
}
"""Module below `vllm.inflight`, and the function that is profiled; its clock."""
LINES = 60

_profiles: dict[str, cProfile.Profile] = {}

_is_on: list[bool] = []
_is_wrapped: list[bool] = []


def begin(worker: Any) -> None:
    """Profile from now on; in the engine's process."""
    del worker
    if not _is_wrapped:
        for path, clock in PHASES.items():
            wrap([path], functools.partial(_profiled, clock))
        _is_wrapped.append(True)
    _profiles.clear()

    _is_on[:] = [True]


def end(worker: Any) -> dict[str, str]:
    """Stop, and return the table of each phase."""
    del worker
    _is_on.clear()
    found = {}
    for name, profile in _profiles.items():
        for order in ("tottime", "cumulative"):
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats(order).print_stats(LINES)
            found[f"{name} by {order}"] = text.getvalue()
    return found


def _profiled(clock: Callable[[], float], name: str, call: Any) -> Any:
    @functools.wraps(call)
    def profiled(*args: Any, **kwargs: Any) -> Any:
        if not _is_on:
            return call(*args, **kwargs)
        profile = _profiles.setdefault(name, cProfile.Profile(clock))
        profile.enable()
        try:
            return call(*args, **kwargs)
        finally:
            profile.disable()

    return profiled
