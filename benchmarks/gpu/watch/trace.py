"""A trace of updates beside decoding: steps, threads, calls of CUDA, kernels.

`collective_rpc` calls `begin` and `end` in the engine's process, and `end` returns the
trace. `python -m benchmarks.gpu.watch.trace FILE` prints one as a table, a line for
each step. It shows where decoding waits: for the GPU, which staging shares, or for the
interpreter, which the thread that stages holds meanwhile.

Times are of the host's clock, in nanoseconds since 1970, as torch's profiler tells
them.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.stopwatch import wrap

PHASES = (
    "engine.update.updates:Updates.start",
    "engine.update.updates:Updates.receive",
    "engine.update.updates:Updates.prepare",
    "engine.update.live_version:LiveVersion.advance",
    "engine.update.ranks:Ranks.command",
    "worker.staging.thread:StagingThread._start",
    "worker.staging.thread:StagingThread._receive",
    "worker.staging.thread:StagingThread._prepare",
    "worker.staging.thread:StagingThread._post",
    "worker.staging.worker:StagingWorker.drain",
    "worker.staging.worker:StagingWorker.staged",
    "worker.staging.worker:StagingWorker.flip",
    "worker.staging.loader:UpdateLoader.__init__",
    "worker.staging.loader:UpdateLoader.foresee",
    "worker.staging.loader:UpdateLoader.verdict",
    "worker.delta.writer:DeltaWriter.__init__",
    "worker.delta.writer:DeltaWriter.begin",
    "worker.delta.writer:DeltaWriter.take",
    "worker.delta.writer:DeltaWriter.problems",
    "worker.delta.writer:DeltaWriter.content",
    "worker.delta.device_writer:DeviceWriter.write",
    "worker.delta.device_writer:DeviceWriter.results",
    "worker.shadow.swap:Swap.__init__",
    "worker.staging.throttle:DeviceThrottle.rest",
    "worker.staging.throttle:_AnyThrottle.take_break",
    "transport.waiting:WaitLimit.until",
    "transport.cuda_ipc.handles:Mappings.find",
    "transport.cuda_ipc.handles:Mappings.end_update",
)
"""Module below `vllm.inflight`, and the function whose calls are told."""

STEP = "step"
LONG_NS = 200_000
"""A call of CUDA that takes longer is told."""
NEAR_NS = 60_000
"""Kernels that follow each other sooner are one stretch of work."""

Span = tuple[int, int]
Row = dict[str, Any]

_profiler: list[Any] = []
_spans: list[Row] = []


def begin(worker: Any) -> None:
    """Record from now on; in the engine's process."""
    from vllm.inflight.worker.step_tracker import StepTracker

    del worker
    if not hasattr(StepTracker.running, "is_told"):
        wrap(PHASES, _told)
        running: Any = _told_steps(StepTracker.running)
        StepTracker.running = running
    _spans.clear()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities = [torch.profiler.ProfilerActivity.CUDA]
    _profiler[:] = [torch.profiler.profile(activities=activities)]
    _profiler[0].start()


def end(worker: Any) -> Row:
    """Stop, and return the trace: `spans`, `streams` and `calls`."""
    del worker
    profiler = _profiler.pop()
    profiler.stop()
    streams: dict[str, list[Any]] = defaultdict(list)
    calls: list[Any] = []
    for event in profiler.profiler.kineto_results.events():
        start, long = event.start_ns(), event.duration_ns()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kernel = event.name(), start, start + long
            streams[str(event.device_resource_id())].append(kernel)
        elif long > LONG_NS or "GraphLaunch" in event.name():
            thread = event.device_resource_id()
            calls.append((event.name(), thread, start, start + long))
    return {
        "spans": list(_spans),
        "streams": {
            stream: stretches(sorted(kernels, key=lambda each: each[1]))
            for stream, kernels in streams.items()
        },
        "calls": sorted(calls, key=lambda each: each[2]),
    }


def stretches(kernels: Iterable[tuple[str, int, int]]) -> list[Row]:
    """Kernels of one stream, in order, as stretches without a pause.

    Each has its begin and end, the time in which a kernel ran, and the three kernels
    that took longest.
    """
    found: list[Row] = []
    for name, start, stop in kernels:
        if not found or start - found[-1]["end"] > NEAR_NS:
            found.append({"begin": start, "end": start, "busy": 0, "names": {}})
        last = found[-1]
        last["busy"] += max(0, stop - max(start, last["end"]))
        last["end"] = max(last["end"], stop)
        short = name[:60]
        last["names"][short] = last["names"].get(short, 0) + stop - start
    for each in found:
        longest = sorted(each["names"].items(), key=lambda item: -item[1])[:3]
        each["names"] = dict(longest)
    return found


def _told(name: str, call: Any) -> Any:
    @functools.wraps(call)
    def told(*args: Any, **kwargs: Any) -> Any:
        if not _profiler:
            return call(*args, **kwargs)
        start, own = time.time_ns(), time.thread_time_ns()
        try:
            return call(*args, **kwargs)
        finally:
            _note(name, start, own)

    return told


def _told_steps(running: Callable[[Any], Any]) -> Any:
    """Tell of the body of each step."""

    @contextmanager
    def told(self: Any) -> Any:
        start, own = time.time_ns(), time.thread_time_ns()
        try:
            with running(self):
                yield
        finally:
            if _profiler:
                _note(STEP, start, own)

    told.is_told = True  # type: ignore[attr-defined]
    return told


def _note(name: str, start: int, own: int) -> None:
    _spans.append(
        {
            "name": name,
            "thread": threading.current_thread().name,
            "begin": start,
            "end": time.time_ns(),
            "own": time.thread_time_ns() - own,
        }
    )


def table(trace: Row, around_ms: float = 60) -> Iterable[str]:
    """A line for each step near an update: milliseconds since its first call.

    `period` is the time to the next step. `body` is the time in the step's own calls,
    and `own` what of it the thread computed: the rest it waited. `gpu` is the time in
    which the busiest stream ran kernels, `others` that of all other streams.
    """
    steps = [s for s in trace["spans"] if s["name"] == STEP]
    others = [s for s in trace["spans"] if s["name"] != STEP]
    if not steps or not others:
        return
    zero = min(s["begin"] for s in others)
    last = max(s["end"] for s in others)
    main, beside = _streams(trace)
    yield f"{'at':>8} {'period':>7} {'body':>6} {'own':>6} {'gpu':>6} {'others':>6}"
    merged = _merged(steps)
    for step, following in pairwise(merged):
        near = 1e6 * around_ms
        if not zero - near < step["begin"] < last + near:
            continue
        span = step["begin"], following["begin"]
        numbers = (
            *(step["begin"] - zero, span[1] - span[0]),
            *(step["end"] - step["begin"], step["own"]),
            *(_busy(main, span), _busy(beside, span)),
        )
        at, *figures = (1e-6 * number for number in numbers)
        yield f"{at:8.2f} " + " ".join(f"{f:6.2f}" for f in figures)
        for each in _within(others, span):
            own = f"own {1e-6 * each['own']:.2f} {each['thread']}"
            yield f"{'':12}{_line(each['name'], each, zero)} {own}"
        for name, thread, start, stop in trace["calls"]:
            if span[0] <= start < span[1] and stop - start > LONG_NS:
                row = {"begin": start, "end": stop}
                yield f"{'':12}{_line(name, row, zero)} thread {thread}"
        for each in _within(beside, span):
            busy = f"busy {1e-6 * each['busy']:.2f} {', '.join(each['names'])}"
            yield f"{'':12}{_line('GPU', each, zero)} {busy}"


def _merged(steps: list[Row]) -> list[Row]:
    """Steps whose bodies come in several pieces: to execute a model, and to sample."""
    found: list[Row] = []
    for step in sorted(steps, key=lambda s: s["begin"]):
        if found and step["begin"] - found[-1]["end"] < LONG_NS:
            found[-1] = found[-1] | {
                "end": step["end"],
                "own": found[-1]["own"] + step["own"],
            }
        else:
            found.append(step)
    return found


def _streams(trace: Row) -> tuple[list[Row], list[Row]]:
    """The stretches of the busiest stream, and those of all others."""
    ordered = sorted(
        trace["streams"].values(),
        key=lambda found: -sum(each["busy"] for each in found),
    )
    rest = [each for found in ordered[1:] for each in found]
    return (ordered or [[]])[0], sorted(rest, key=lambda each: each["begin"])


def _busy(found: list[Row], span: Span) -> int:
    """Time of a span in which these stretches lie."""
    return sum(
        max(0, min(each["end"], span[1]) - max(each["begin"], span[0]))
        for each in found
    )


def _within(found: list[Row], span: Span) -> list[Row]:
    """What begins in a span."""
    ordered = sorted(found, key=lambda each: each["begin"])
    begins = [each["begin"] for each in ordered]
    return ordered[bisect_left(begins, span[0]) : bisect_left(begins, span[1])]


def _line(name: str, row: Row, zero: int) -> str:
    at, to = (1e-6 * (row[key] - zero) for key in ("begin", "end"))
    return f"{at:8.2f} to {to:8.2f} {name}"


def main() -> None:
    for file in sys.argv[1:]:
        for name, trace in json.loads(Path(file).read_text()).items():
            print(name)
            for line in table(trace):
                print(line)


if __name__ == "__main__":
    main()
