"""A stopwatch for staging: which call of the engine's process takes how long.

Runs there, put on and read by `collective_rpc`. Times are inclusive: a call has those
of the calls it makes. On the wall there is the wait for the interpreter in them, which
decoding holds; the processor time of the thread has none.
"""

from __future__ import annotations

import functools
import gc
import importlib
import time
from collections import defaultdict
from typing import Any

WATCHED = (
    "engine.updates:Updates.begin",
    "engine.updates:Updates.receive",
    "engine.updates:Updates.seal",
    "engine.served:Served.advance",
    "commit.ledger:Ledger.move",
    "stage.job:Job._begin",
    "stage.job:Job._receive",
    "stage.job:Job._seal",
    "stage.job:Job._post",
    "stage.stager:Stager.drain",
    "stage.stager:Stager.staged",
    "stage.shadow:Shadow.prepare",
    "stage.coverage:Coverage.watch",
    "stage.coverage:Coverage.unwatch",
    "stage.coverage:Coverage.short",
    "stage.coverage:Coverage.replayed",
    "stage.intake:Intake.__init__",
    "stage.intake:Intake.load_weights",
    "stage.intake:Intake.verdict",
    "stage.intake:Intake._place",
    "stage.intake:Intake._accepted",
    "stage.intake:Intake._replay",
    "stage.job:Job._progress",
    "stage.inspection:Inspection.admits",
    "stage.inspection:Inspection.judge",
    "stage.inspection:Inspection.facts",
    "stage.audit:Audit.add",
    "stage.audit:Audit._enqueue",
    "stage.audit:Audit.results",
    "stage.drift:Sampler.add",
    "stage.drift:Sampler.samples",
    "stage.content:Content.digest",
    "stage.pace:DevicePace.rest",
    "stage.job:tally",
    "stage.job:carry",
    "stage.job:derive",
    "stage.job:retie",
    "wire.announcement:Announcement.wholes",
    "wire.assembly:Assembly.into",
    "wire.assembly:Assembly.make_room",
    "wire.assembly:Assembly.received",
    "wire.receiver:Receiver.tensors",
    "wire.receiver:_Transfer._begin",
    "wire.exports:Mappings.find",
    "wire.ipc:IpcUpdateInfo.__post_init__",
    "wire.ipc:Reader.broadcast",
    "wire.device_memory:CudaMemory.copy",
    "wire.watch:Watch.until",
)
"""Module below `vllm.inflight`, and what in it."""

MILESTONES = (
    "Updates.",
    "Served.",
    "Ledger.",
    "Job._begin",
    "Job._receive",
    "Job._seal",
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
    for path in WATCHED:
        module_name, name = path.split(":")
        owner: Any = importlib.import_module(f"vllm.inflight.{module_name}")
        *parents, attribute = name.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, _timed(name, getattr(owner, attribute)))


def read(worker: Any) -> dict[str, Any]:
    """What was timed since the last reading, in milliseconds, longest first."""
    del worker
    parts = {
        name: [count, round(1e3 * wall, 3), round(1e3 * own, 3)]
        for name, (count, wall, own) in sorted(_spent.items(), key=lambda s: -s[1][1])
    }
    begun = [start for name, start, _ in _calls if name == "Updates.begin"]
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
