"""The encoder cache: encoder outputs belong to one version, as KV does.

vLLM caches the encoder output of an image under a name that identifies the image and no
weights. So a request names its media by its prefix-cache namespace (prefix_cache.py).

A running request keeps its names. A request that lost its KV and resumes in another
namespace gets new names, which the workers learn. Outputs that no request refers to are
dropped when the weights change. If the workers have dropped an output that a request
still reads, that request begins again.
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
"""Maps the name of an item to its name in a namespace."""


def plant(request: upstream.Request, rename: Rename) -> None:
    """Rename the media of a request without KV, which reads no encoder output.

    Workers may have old names from before its preemption; see `tell`.
    """
    if not request.mm_features:
        return
    # The original names. A session gets more items over time.
    names = RequestState.of(request).media
    names += names_of(request.mm_features[len(names) :])
    request.mm_features = renamed(request.mm_features, names, rename)


def names_of(items: Sequence[Any]) -> list[str]:
    """The names of the items of a request."""
    return [item.identifier for item in items]


def renamed(items: Sequence[Any], names: Sequence[str], rename: Rename) -> list[Any]:
    """Copies of the items under other names.

    Several requests may share the items. The processor cache has no version, so
    `mm_hash` does not change.
    """
    return [
        replace(item, identifier=rename(name), mm_hash=item.mm_hash or name)
        for item, name in zip(items, names, strict=True)
    ]


def tell(requests: Mapping[str, Any], output: Any) -> None:
    """Add the media names of resumed requests to a step.

    Workers keep the old names. With those, a worker would read an output of an older
    namespace that another request still holds.

    Args:
        requests: the scheduler's requests by id.
        output: upstream's `SchedulerOutput`. Its `StepState` gets the names of media
            of resumed requests.

    """
    found = {}
    for each in output.scheduled_cached_reqs.resumed_req_ids:
        if items := requests[each].mm_features:
            found[each] = names_of(items)
    if found:
        StepState.of(output).media = found


def learn(known: Mapping[str, Any], output: object) -> None:
    """Rename the media of a worker's requests to the names of a step.

    Args:
        known: the worker's requests by id.
        output: the `SchedulerOutput` after `tell`.

    """
    for each, names in StepState.of(output).media.items():
        state = known[each]
        state.mm_features = renamed(state.mm_features, names, str)


def drop_idle(manager: Any) -> int:
    """Evict outputs that no request refers to; returns their number.

    Args:
        manager: upstream's encoder cache. Other kinds than the default have no list of
            such outputs, and rely on the names.

    """
    idle: dict[str, int] = getattr(manager, "freeable", {})
    num_dropped = len(idle)
    while idle:
        name, num_embeds = idle.popitem()
        del manager.cached[name]
        getattr(manager, "num_embeds_by_hash", {}).pop(name, None)  # from 0.31 on
        manager.num_free_slots += num_embeds
        manager.freed.append(name)  # the workers learn of it with the next step
    return num_dropped


def readers(scheduler: upstream.Scheduler) -> set[str]:
    """The ids of requests that still have to read a cached encoder output."""
    # The cache of encoder-decoder models has no such list.
    items = getattr(scheduler.encoder_cache_manager, "request_cached_ids", {})
    return {name for name, numbers in items.items() if numbers}


def unretractable(scheduler: upstream.Scheduler) -> request_checks.Groups:
    """The requests that read an encoder output and cannot be retracted."""
    stuck = request_checks.unretractable(scheduler, readers(scheduler))
    return stuck | request_checks.scoring(scheduler)


def check_retractable(scheduler: upstream.Scheduler) -> None:
    """Raise `PauseConflict` if a request that reads an output cannot be retracted."""
    if stuck := unretractable(scheduler):
        raise PauseConflict(
            f"the encoder outputs that are dropped with these weights are in use by "
            f"{request_checks.joined(stuck)}; try again when they are done"
        )


def see_again(core: upstream.EngineCore) -> None:
    """Compute all encoder outputs again, since workers may have dropped theirs."""
    scheduler = core.scheduler
    SchedulerState.of(scheduler).retract(readers(scheduler))
    # Upstream's call for both parts would warn of requests that read the outputs.
    scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()
