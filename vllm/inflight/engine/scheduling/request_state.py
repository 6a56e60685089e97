"""What the scheduler remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.inflight.attached import AttachedOnDemand

Trail = list[tuple[int, str | None]]
"""Pairs of first position and version stamp, ascending; None: unknown version."""


class CacheNamespace(NamedTuple):
    """The prefix-cache namespace in which a chain of blocks began."""

    epoch: int
    """The cache epoch."""
    load: int = 0
    """The number of earlier loads of the adapter; see lora.py."""


@dataclass(slots=True)
class RequestState(AttachedOnDemand):
    """The KV provenance and the block hashes of a request."""

    root: CacheNamespace | None = None
    """The namespace of its hashes; None: they are upstream's."""
    user_salt: str | None = None
    """The salt of the user, once `root` is set."""
    hashes: dict[CacheNamespace, Any] = field(default_factory=dict)
    """Its block hashes in other namespaces."""
    media: list[str] = field(default_factory=list)
    """The original names of its media, see encoder_cache.py."""
    trail: Trail | None = None
    """The KV provenance; None before it has KV."""
    num_found: int = 0
    """The number of tokens that it found in the prefix cache of this engine."""
    is_retracted: bool = False
    """Whether it was retracted or preempted, so that it is computed again."""
