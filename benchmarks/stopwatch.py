"""A stopwatch for staging: the time of each call in the engine's process.

`collective_rpc` starts and reads it there. Times include the calls that a call makes.
Wall time includes the wait for the interpreter, which decoding holds. Processor time of
the thread does not.
"""

from __future__ import annotations

import functools
import gc
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

WATCHED = (
    "engine.update.updates:Updates.start",
    "engine.update.updates:Updates.receive",
    "engine.update.updates:Updates.prepare",
    "engine.update.live_version:LiveVersion.advance",
    "engine.update.ledger:Ledger.move",
    "worker.staging.thread:StagingThread._start",
    "worker.staging.thread:StagingThread._receive",
    "worker.staging.thread:StagingThread._prepare",
    "worker.staging.thread:StagingThread._post",
    "worker.staging.worker:StagingWorker.drain",
    "worker.staging.worker:StagingWorker.staged",
    "worker.shadow.shadow_model:ShadowModel.prepare",
    "worker.staging.coverage:Coverage.watch",
    "worker.staging.coverage:Coverage.unwatch",
    "worker.staging.coverage:Coverage.short",
    "worker.staging.coverage:Coverage.replayed",
    "worker.staging.loader:UpdateLoader.__init__",
    "worker.staging.loader:UpdateLoader.load_weights",
    "worker.staging.loader:UpdateLoader.verdict",
    "worker.staging.loader:UpdateLoader._place",
    "worker.staging.loader:UpdateLoader._accepted",
    "worker.staging.loader:UpdateLoader._replay",
    "worker.staging.thread:StagingThread._progress",
    "worker.verify.checks:TensorChecks.accepts",
    "worker.verify.checks:TensorChecks.judge",
    "worker.verify.checks:TensorChecks.facts",
    "ops.gpu_digest:GpuDigest.add",
    "ops.gpu_digest:GpuDigest._enqueue",
    "ops.gpu_digest:GpuDigest.results",
    "worker.verify.drift:Sampler.add",
    "worker.verify.drift:Sampler.samples",
    "worker.verify.content:Content.digest",
    "worker.staging.throttle:DeviceThrottle.rest",
    "worker.staging.coverage:Coverage.tally",
    "worker.staging.thread:copy_unsent",
    "worker.shadow.shadow_model:ShadowModel.derive",
    "worker.staging.thread:retie",
    "transport.buckets.tensor_list:TensorList.wholes",
    "transport.buckets.reassembly:Reassembly.into",
    "transport.buckets.reassembly:Reassembly.make_room",
    "transport.buckets.reassembly:Reassembly.received",
    "transport.buckets.receiver:Receiver.tensors",
    "transport.buckets.receiver:_Transfer._begin",
    "transport.cuda_ipc.handles:Mappings.find",
    "transport.cuda_ipc.receiver_engine:IpcUpdateInfo.__post_init__",
    "transport.cuda_ipc.receiver_engine:Reader.broadcast",
    "transport.cuda_ipc.driver:CudaMemory.copy",
    "transport.waiting:WaitLimit.until",
)
"""Module below `vllm.inflight`, and what in it."""

MILESTONES = (
    "Updates.",
    "LiveVersion.",
    "Ledger.",
    "StagingThread._start",
    "StagingThread._receive",
    "StagingThread._prepare",
)
"""Beginnings of the names whose calls are told one by one."""

_spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
"""Name → calls, seconds on the wall, seconds of the thread."""
_calls: list[tuple[str, float, float]] = []
"""Name, begin and end of the milestones."""
_collections: list[float] = []
"""When the one under way began."""


def put_on(worker: Any) -> None:
    """Time every call of `WATCHED` from now on, and every collection of garbage."""
    del worker
    gc.callbacks.append(_collecting)
    wrap(WATCHED, _timed)


def wrap(paths: Iterable[str], wrapper: Callable[[str, Any], Any]) -> None:
    """Put a wrapper around functions, as `WATCHED` names them.

    Args:
        paths: module below `vllm.inflight`, and what in it.
        wrapper: called with the name and the function; returns what takes its place.

    """
    for path in paths:
        owner, attribute = located(path)
        name = path.partition(":")[2]
        setattr(owner, attribute, wrapper(name, getattr(owner, attribute)))


def located(path: str) -> tuple[Any, str]:
    """What has a function that `WATCHED` names, and the function's name in it.

    Args:
        path: module below `vllm.inflight`, and what in it.

    Raises:
        AttributeError: the module has no such thing.

    """
    module_name, name = path.split(":")
    owner: Any = importlib.import_module(f"vllm.inflight.{module_name}")
    *parents, attribute = name.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    getattr(owner, attribute)
    return owner, attribute


def read(worker: Any) -> dict[str, Any]:
    """The times since the last reading in milliseconds, longest first."""
    del worker
    parts = {
        name: [count, round(1e3 * wall, 3), round(1e3 * own, 3)]
        for name, (count, wall, own) in sorted(_spent.items(), key=lambda s: -s[1][1])
    }
    begun = [start for name, start, _ in _calls if name == "Updates.start"]
    first = begun[-1] if begun else 0.0
    last = [
        [name, round(1e3 * (start - first), 2), round(1e3 * (end - first), 2)]
        for name, start, end in sorted(_calls, key=lambda call: call[1])
        if start >= first
    ]
    _spent.clear()
    _calls.clear()
    return {"parts": parts, "last_update": last}


def _collecting(phase: str, info: dict[str, int]) -> None:
    """All collections of a generation together, and the longest beside them."""
    if phase == "start":
        _collections.append(time.monotonic())
        return
    took = time.monotonic() - _collections.pop()
    whole = _spent[name := f"gc {info['generation']}"]
    longest = _spent[f"{name}, the longest"]
    whole[0], whole[1] = whole[0] + 1, whole[1] + took
    longest[0], longest[1] = 1, max(longest[1], took)


def _timed(name: str, call: Any) -> Any:
    is_milestone = name.startswith(MILESTONES)

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start, own = time.monotonic(), time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            end = time.monotonic()
            spent = _spent[name]
            spent[0] += 1
            spent[1] += end - start
            spent[2] += time.thread_time() - own
            if is_milestone:
                _calls.append((name, start, end))

    return timed
