"""Where the time of staging goes, by functions: a sampling profiler.

`collective_rpc` calls `begin` and `end` in the engine's process. In between a thread of
its own looks every millisecond at where the phases of an update are, and the thread
that steps. Waits count, for the GPU and for the interpreter too. Python's own profiler
cannot do this: from Python 3.12 on it counts the calls of all threads as those of one.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

from benchmarks.stopwatch import wrap

PHASES = (
    "worker.staging.thread:StagingThread._start",
    "worker.staging.thread:StagingThread._receive",
    "worker.staging.thread:StagingThread._prepare",
    "worker.staging.thread:StagingThread._call_extension",
)
"""Module below `vllm.inflight`, and the function that is profiled."""
STEPPING = "the thread that steps"
EVERY_S = 0.001
LINES = 40

Report = dict[str, dict[str, list[list[Any]]]]
"""Phase → "own" and "with calls" → functions, each with its seconds; longest first.
Those of "own" have their line: native code counts for the line that calls it."""


class Sampler:
    """Looks at threads from `begin` until `end`."""

    def __init__(self, stepping: int) -> None:
        self.threads = {stepping: STEPPING}
        """Identifier of a thread → the phase that it is in."""
        self._own: dict[str, Counter[str]] = defaultdict(Counter)
        self._all: dict[str, Counter[str]] = defaultdict(Counter)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> Report:
        self._ended.set()
        self._thread.join()
        return {
            phase: {
                "own": _longest(self._own[phase]),
                "with calls": _longest(self._all[phase]),
            }
            for phase in self._all
        }

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(EVERY_S):
            frames = sys._current_frames()
            now = time.perf_counter()
            for thread, phase in list(self.threads.items()):
                if thread in frames:
                    self._add(phase, frames[thread], now - last)
            last = now

    def _add(self, phase: str, frame: FrameType | None, seconds: float) -> None:
        if frame is not None:
            self._own[phase][f"{_name(frame)}, line {frame.f_lineno}"] += seconds
        names = set()
        while frame is not None:
            names.add(_name(frame))  # once, also if it calls itself
            frame = frame.f_back
        for name in names:
            self._all[phase][name] += seconds


_sampler: list[Sampler] = []
_is_wrapped: list[bool] = []


def begin(worker: Any) -> None:
    """Profile from now on; in the engine's process, on the thread that steps."""
    del worker
    if not _is_wrapped:
        wrap(PHASES, _noted)
        _is_wrapped.append(True)
    _sampler[:] = [Sampler(threading.get_ident())]


def end(worker: Any) -> Report:
    """Stop, and return the seconds of each phase by functions."""
    del worker
    return _sampler.pop().end()


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(code.co_filename.rsplit('/', 3)[1:])}: {code.co_qualname}"


def _longest(found: Counter[str]) -> list[list[Any]]:
    return [[name, round(seconds, 4)] for name, seconds in found.most_common(LINES)]


def _noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(*args: Any, **kwargs: Any) -> Any:
        # Another thread may end the profile at any moment.
        if (sampler := next(iter(_sampler), None)) is None:
            return call(*args, **kwargs)
        threads, thread = sampler.threads, threading.get_ident()
        before = threads.get(thread)
        threads[thread] = name
        try:
            return call(*args, **kwargs)
        finally:
            if before is None:
                del threads[thread]
            else:
                threads[thread] = before

    return noted
