"""Requests that cannot be treated like others, and how a refusal names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.inflight import upstream

NUM_NAMED = 4


def unretractable(scheduler: Any) -> str:
    """The requests whose KV cannot be computed again here; empty if there are none.

    KV that another engine is sending arrives into blocks that must stay, and a
    streaming session goes on from KV of tokens it no longer has.
    """
    remote, sessions = [], []
    for request in scheduler.requests.values():
        if request.status == upstream.RequestStatus.WAITING_FOR_REMOTE_KVS:
            remote.append(request.request_id)
        elif request.streaming_queue is not None:
            sessions.append(request.request_id)
    return _joined(
        ("waiting for remote KV", remote),
        ("in a streaming session", sessions),
    )


def holders(scheduler: Any) -> str:
    """The requests that hold KV without running; empty if there are none."""
    waiting = [request.request_id for request in scheduler.kv_holding_waiting]
    finished = [r.request_id for r in scheduler.requests.values() if r.is_finished()]
    in_flight = ["steps"] if scheduler.deferred_frees else []
    return _joined(
        ("waiting for remote KV or in a streaming session", waiting),
        ("finished, with a connector still reading", finished),
        ("in flight", in_flight),
    )


def _joined(*groups: tuple[str, list[str]]) -> str:
    return "; ".join(f"{_names(ids)} ({what})" for what, ids in groups if ids)


def _names(ids: Iterable[str]) -> str:
    """The first few ids, and how many more there are."""
    first, *_ = listed = list(ids)
    if len(listed) == 1:
        return f"request {first!r}"
    named = ", ".join(map(repr, listed[:NUM_NAMED]))
    more = len(listed) - NUM_NAMED
    return f"requests {named}" + (f" and {more} more" if more > 0 else "")
