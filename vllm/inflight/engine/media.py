"""Encoder outputs of media: of one version of the weights, as KV is.

vLLM keeps what a vision tower has made of an image under a name that tells the image
and no weights. So a request that begins under a root (see cache.py) calls its media by
names of that root. A request that runs on keeps its names, which its worker knows; what
no request refers to is dropped when the weights change, so that one that is computed
again is computed from the new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

Rename = Callable[[str], str]
"""The name of an item → its name under a root."""


def plant(request: Any, rename: Rename) -> None:
    """Give the media of a request that no worker knows yet their names."""
    if not request.mm_features or request.num_preemptions:
        return
    # As they came; a session's grow.
    names = vars(request).setdefault("inflight_media", [])
    names += [item.identifier for item in request.mm_features[len(names) :]]
    # Others may hold the same items: the samples of one prompt do.
    request.mm_features = [
        replace(item, identifier=rename(name))
        for item, name in zip(request.mm_features, names, strict=True)
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
