"""What the scheduler remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.inflight.attached import AttachedOnDemand

Trail = list[tuple[int, str | None]]
"""(first position, stamp of the version), ascending; None: nobody knows which."""


class CacheNamespace(NamedTuple):
    """Under which weights a chain of blocks was begun."""

    epoch: int
    """Of the cache."""
    load: int = 0
    """Of the adapter; see lora.py."""


@dataclass(slots=True)
class RequestState(AttachedOnDemand):
    """Where the KV of a request comes from, and how it is looked up."""

    root: CacheNamespace | None = None
    """The namespace that its hashes are of; None: they are as upstream made them."""
    user_salt: str | None = None
    """The salt that it was given, once it has a root."""
    hashes: dict[CacheNamespace, Any] = field(default_factory=dict)
    """Its block hashes under other roots."""
    media: list[str] = field(default_factory=list)
    """What its items of media are called without a root."""
    trail: Trail | None = None
    """Its KV provenance; None while it has no KV."""
    num_found: int = 0
    """How many tokens it found in the prefix cache of this engine."""
    is_retracted: bool = False
    """Whether it is computed again under the weights that are live by then."""
