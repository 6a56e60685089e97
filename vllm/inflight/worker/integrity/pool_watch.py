"""Upstream's memory pools, watched: who gives memory back past the engine core.

Upstream's sleep asks the allocator of the pools to give memory back. A worker extension
may ask it, too, and then no call of the worker tells of it. So the calls of the
allocator (patch/sleep.py) note which parts of the memory sleep.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.attached import Attached
from vllm.inflight.update import KV_CACHE, WEIGHTS
from vllm.inflight.worker.integrity.outside_writes import note_asleep, note_awake


class PoolUser(Attached):
    """The worker whose memory is in the pools of an allocator.

    Args:
        worker: is not kept alive.

    """

    __slots__ = ("worker",)

    def __init__(self, worker: upstream.WorkerBase) -> None:
        self.worker = weakref.ref(worker)


def watch_pools(worker: upstream.WorkerBase) -> None:
    """Note from now on what sleeps in the pools, for the worker that allocates there.

    Args:
        worker: upstream's allocator has one for each process.

    """
    PoolUser(worker).attach(upstream.device_allocator.get_mem_allocator_instance())


def note_pools_asleep(
    allocator: Any, tags: Collection[str] | str | None, kept: Collection[str] | str
) -> None:
    """Note which parts of the memory the allocator is about to give back.

    Args:
        allocator: that gives it back.
        tags: of the parts; None for all. A str is one tag, as for upstream.
        kept: tags of the parts whose content comes back.

    Raises:
        UpdateBusy: see `note_asleep`.

    """
    if (worker := _worker_of(allocator)) is not None:
        used = {data.tag for data in allocator.pointer_to_data.values()}
        given = used if tags is None else used & _set(tags)
        note_asleep(worker, given & {WEIGHTS, KV_CACHE}, _set(kept))


def note_pools_awake(allocator: Any, tags: Collection[str] | None) -> None:
    """Note which parts have their memory again.

    Args:
        allocator: that has got the memory.
        tags: of the parts; None for all.

    """
    if (worker := _worker_of(allocator)) is not None:
        used = {data.tag for data in allocator.pointer_to_data.values()}
        note_awake(worker, used if tags is None else used & _set(tags))


def _worker_of(allocator: Any) -> upstream.WorkerBase | None:
    user = PoolUser.find(allocator)
    return None if user is None else user.worker()


def _set(tags: Collection[str] | str) -> set[str]:
    return {tags} if isinstance(tags, str) else set(tags)
