"""Encoder outputs of media: of one version of the weights, as KV is.

vLLM keeps what a vision tower has made of an image under a name that tells the image
and no weights. So a request that begins under a root (see prefix_cache.py) calls its
media by names of that root. A request that runs on keeps its names. A request that has
lost its KV, and resumes under another root, gets other names, and its workers are told.
What no request refers to is dropped when the weights change. Where workers have dropped
what they had, a request in the middle of an item begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling import request_checks
from vllm.inflight.engine.scheduling.request_state import RequestState
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.engine.scheduling.step_state import StepState
from vllm.inflight.errors import PauseConflict

Rename = Callable[[str], str]
"""The name of an item → its name under a root."""


def plant(request: upstream.Request, rename: Rename) -> None:
    """Give the media of a request that has no KV, and so reads no output, their names.

    Workers may know it by other names, of before it was preempted: see `tell`.
    """
    if not request.mm_features:
        return
    # As they came; a session's grow.
    names = RequestState.of(request).media
    names += names_of(request.mm_features[len(names) :])
    request.mm_features = renamed(request.mm_features, names, rename)


def names_of(items: Sequence[Any]) -> list[str]:
    """What the items of a request are called."""
    return [item.identifier for item in items]


def renamed(items: Sequence[Any], names: Sequence[str], rename: Rename) -> list[Any]:
    """The items under other names; others may hold the same, as samples of one prompt.

    What a processor made of them has no version, and is found as before.
    """
    return [
        replace(item, identifier=rename(name), mm_hash=item.mm_hash or name)
        for item, name in zip(items, names, strict=True)
    ]


def tell(requests: Mapping[str, Any], output: Any) -> None:
    """Have a step tell the names of those that resume; workers keep those they had.

    Otherwise a worker would read what another request of an older root still holds.

    Args:
        requests: those of the scheduler, by id.
        output: upstream's `SchedulerOutput`; its `StepState` gets the names.

    """
    found = {}
    for each in output.scheduled_cached_reqs.resumed_req_ids:
        if items := requests[each].mm_features:
            found[each] = names_of(items)
    if found:
        StepState.of(output).media = found


def learn(known: Mapping[str, Any], output: object) -> None:
    """Call the media of a worker's requests by the names that a step tells.

    Args:
        known: the requests of the worker, by id.
        output: what `tell` has seen.

    """
    for each, names in StepState.of(output).media.items():
        state = known[each]
        state.mm_features = renamed(state.mm_features, names, str)


def drop_idle(manager: Any) -> int:
    """Evict what no request refers to; returns how many outputs.

    Args:
        manager: upstream's encoder cache; others than its default keep no such list,
            and go by the names.

    """
    idle: dict[str, int] = getattr(manager, "freeable", {})
    num_dropped = len(idle)
    while idle:
        name, num_embeds = idle.popitem()
        del manager.cached[name], manager.num_embeds_by_hash[name]
        manager.num_free_slots += num_embeds
        manager.freed.append(name)  # the workers learn of it with the next step
    return num_dropped


def readers(scheduler: upstream.Scheduler) -> set[str]:
    """The requests that have yet to read an output that there is, by id."""
    # Of an encoder whose decoder keeps what it makes of it, nobody has.
    items = getattr(scheduler.encoder_cache_manager, "request_cached_ids", {})
    return {name for name, numbers in items.items() if numbers}


def check_retractable(scheduler: upstream.Scheduler) -> None:
    """Raise `PauseConflict` if somebody cannot see again what it is looking at."""
    stuck = request_checks.unretractable(scheduler, readers(scheduler))
    if stuck := stuck or request_checks.scoring(scheduler):
        raise PauseConflict(
            f"the encoder outputs that are dropped with these weights are read by "
            f"{stuck}; try again when its turn is over"
        )


def see_again(core: upstream.EngineCore) -> None:
    """Have all items computed anew, since workers may have dropped what they had."""
    scheduler = core.scheduler
    SchedulerState.of(scheduler).retract(readers(scheduler))
    # Upstream's own call of both parts warns of requests that read what is dropped.
    scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()
