"""Upstream's memory pools, watched: who gives memory back past the engine core.

Upstream's sleep asks the allocator of the pools to give memory back. A worker extension
may ask it, too, and then no call of the worker tells of it. So the calls of the
allocator note which parts of the memory sleep, on the tripwire of the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.update import KV_CACHE, WEIGHTS
from vllm.inflight.worker.integrity.outside_writes import note_asleep, note_awake
from vllm.inflight.worker.memory.placement import is_wanted
from vllm.inflight.worker.worker_state import WorkerState

NAMES = ("sleep", "discard", "wake_up")
"""The calls of upstream's allocator; before 0.31 there is no `discard`."""


class PoolWatch:
    """The calls of the allocator of one process, for the worker that uses it.

    Args:
        worker: whose memory is in the pools.
        own: the allocator's own calls, by name.

    """

    def __init__(
        self, worker: upstream.WorkerBase, own: dict[str, Callable[..., Any]]
    ) -> None:
        self._worker = worker
        self._own = own
        has_weights = not is_wanted(worker.vllm_config)
        self._parts = {WEIGHTS, KV_CACHE} if has_weights else {KV_CACHE}
        """The parts of the memory that are in the pools, not in an arena."""

    def sleep(self, offload_tags: Any = None) -> Any:
        """Give all parts back; those that `offload_tags` names keep their content."""
        kept = _tags(offload_tags) & self._parts
        return self._give_back(self._parts, kept, "sleep", offload_tags)

    def discard(self, tags: Any) -> Any:
        """Give the parts back that `tags` names; their content is lost."""
        return self._give_back(_tags(tags) & self._parts, set(), "discard", tags)

    def wake_up(self, tags: Any = None) -> Any:
        """Get the memory again of the parts that `tags` names, or of all."""
        answer = self._own["wake_up"](tags)
        named = self._parts if tags is None else _tags(tags) & self._parts
        note_awake(self._worker, named)
        return answer

    def own(self) -> dict[str, Callable[..., Any]]:
        """The allocator's own calls, by name."""
        return self._own

    def _give_back(
        self, parts: set[str], kept: set[str], name: str, tags: object
    ) -> Any:
        note_asleep(self._worker, parts, kept)  # also if the call fails half-way
        if WEIGHTS in parts - kept:
            stager = WorkerState.of(self._worker).stager
            if stager is not None:
                stager.forget(served=True)
                stager.shadow.stale.update(stager.shadow.required)
        return self._own[name](tags)


def watch_pools(worker: upstream.WorkerBase) -> None:
    """Watch the allocator of upstream's pools, in place of an earlier worker's watch.

    Args:
        worker: whose models are loaded.

    """
    allocator = upstream.device_allocator.get_mem_allocator_instance()
    before = getattr(vars(allocator).get("sleep"), "__self__", None)
    own = (
        before.own()
        if isinstance(before, PoolWatch)
        else {n: getattr(allocator, n) for n in NAMES if hasattr(allocator, n)}
    )
    watch = PoolWatch(worker, own)
    vars(allocator).update({name: getattr(watch, name) for name in own})


def _tags(tags: Any) -> set[str]:
    """Tags as upstream's allocator takes them: one, several, or None for its own."""
    return {tags} if isinstance(tags, str) else set(tags or ())
