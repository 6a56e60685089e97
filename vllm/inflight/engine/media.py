"""Encoder outputs of media: of one version of the weights, as KV is.

vLLM keeps what a vision tower has made of an image under a name that tells the image
and no weights. So a request that begins under a root (see cache.py) calls its media by
names of that root. A request that runs on keeps its names, which its worker knows; what
no request refers to is dropped when the weights change, so that one that is computed
again is computed from the new ones. Where workers have dropped what they had, a request
in the middle of an item begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm.inflight.engine import requests
from vllm.inflight.errors import PauseConflict

Rename = Callable[[str], str]
"""The name of an item → its name under a root."""


def plant(request: Any, rename: Rename) -> None:
    """Give the media of a request that no worker knows yet their names."""
    if not request.mm_features or request.num_preemptions:
        return
    # As they came; a session's grow.
    names = vars(request).setdefault("inflight_media", [])
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


def readers(scheduler: Any) -> set[str]:
    """The requests that have yet to read an output that there is, by id."""
    # Of an encoder whose decoder keeps what it makes of it, nobody has.
    items = getattr(scheduler.encoder_cache_manager, "request_cached_ids", {})
    return {name for name, numbers in items.items() if numbers}


def check(scheduler: Any) -> None:
    """Raise `PauseConflict` if somebody cannot see again what it is looking at."""
    stuck = requests.unretractable(scheduler, readers(scheduler))
    if stuck := stuck or requests.scoring(scheduler):
        raise PauseConflict(
            f"the encoder outputs that are dropped with these weights are read by "
            f"{stuck}; try again when its turn is over"
        )


def see_again(core: Any) -> None:
    """Have all items computed anew, since workers may have dropped what they had."""
    scheduler = core.scheduler
    scheduler.inflight_retract(readers(scheduler))
    # Upstream's own call of both parts warns of requests that read what is dropped.
    scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()
