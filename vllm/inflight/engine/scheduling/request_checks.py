"""Checks whether a pause or a flush is possible for the current requests."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.errors import PauseConflict
from vllm.inflight.update import PauseMode

NUM_NAMED = 4

Groups = dict[str, list[str]]
"""Ids of requests, by what they have in common; no list is empty."""


def check_mode(
    scheduler: upstream.Scheduler, mode: PauseMode, *, in_process: bool
) -> None:
    """Raise `PauseConflict` if `mode` is impossible for the current requests.

    Args:
        in_process: whether the engine steps in its caller's process.

    """
    if mode is PauseMode.RETRACT and (stuck := unretractable(scheduler)):
        raise PauseConflict(
            f"mode 'retract' cannot free the KV of {joined(stuck)}; use 'wait', "
            "'abort' or 'in_place'"
        )
    if mode is PauseMode.WAIT and in_process and SchedulerState.of(scheduler).is_busy():
        raise PauseConflict(
            "mode 'wait' needs an engine with its own process; with this engine, "
            "let generate() finish first"
        )


def check_flush(
    scheduler: upstream.Scheduler, mode: PauseMode, *, is_later: bool = False
) -> None:
    """Raise `PauseConflict` if requests would still hold KV after `mode`.

    Args:
        is_later: whether the flush waits until no step is in flight.

    """
    if mode is PauseMode.IN_PLACE and scheduler.running:
        raise PauseConflict(
            f"flush_cache cannot drop the KV of {len(scheduler.running)} requests "
            "that stay in place; use mode 'retract'"
        )
    if mode is PauseMode.WAIT or (is_later and mode is PauseMode.ABORT):
        return
    if held := holders(scheduler, is_later=is_later):
        raise PauseConflict(f"flush_cache cannot drop the KV of {held}")


def unretractable(
    scheduler: upstream.Scheduler, among: Iterable[str] | None = None
) -> Groups:
    """The requests that cannot be retracted; empty without one.

    KV that another engine sends needs its blocks. A streaming session needs its KV,
    because it no longer has the tokens. A session without KV needs nothing.

    Args:
        scheduler: of the engine core.
        among: the ids of the requests to check; None for all.

    """
    statuses = upstream.RequestStatus
    remote, sessions = [], []
    for name in scheduler.requests if among is None else among:
        request = scheduler.requests[name]
        if request.status == statuses.WAITING_FOR_REMOTE_KVS:
            remote.append(request.request_id)
        elif request.streaming_queue is not None and (
            request.num_computed_tokens or request.status == statuses.RUNNING
        ):
            sessions.append(request.request_id)
    return _filled(
        {"waiting for remote KV": remote, "in a streaming session": sessions}
    )


def scoring(scheduler: upstream.Scheduler) -> Groups:
    """The requests that score by late interaction.

    Workers keep an encoder output of theirs for other requests.
    """
    found = [
        name
        for name, request in scheduler.requests.items()
        if getattr(request.pooling_params, "late_interaction_params", None) is not None
    ]
    return _filled({"scoring by late interaction": found})


def holders(scheduler: upstream.Scheduler, *, is_later: bool = False) -> str:
    """A text that names the requests that hold KV without running; empty without one.

    Args:
        is_later: leave out requests that hold KV only while a step is in flight.

    """
    waiting = [
        request.request_id
        for request in SchedulerState.of(scheduler).waiting.holding_kv()
    ]
    finished, in_flight = [], []
    if not is_later:
        requests = scheduler.requests.values()
        finished = [request.request_id for request in requests if request.is_finished()]
        in_flight = ["steps"] if scheduler.deferred_frees else []
    return joined(
        _filled(
            {
                "waiting for remote KV or in a streaming session": waiting,
                "finished, with a connector still reading": finished,
                "in flight": in_flight,
            }
        )
    )


def joined(groups: Groups) -> str:
    """A text that names the requests of all groups; empty without one."""
    return "; ".join(f"{_names(ids)} ({what})" for what, ids in groups.items())


def _filled(groups: Groups) -> Groups:
    return {what: ids for what, ids in groups.items() if ids}


def _names(ids: Iterable[str]) -> str:
    """The first few ids, and the number of the others."""
    first, *_ = listed = list(ids)
    if len(listed) == 1:
        return f"request {first!r}"
    named = ", ".join(map(repr, listed[:NUM_NAMED]))
    more = len(listed) - NUM_NAMED
    return f"requests {named}" + (f" and {more} more" if more > 0 else "")
