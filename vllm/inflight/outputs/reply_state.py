"""What the front end remembers of one request and of what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.inflight.attached import AttachedOnDemand


@dataclass(slots=True)
class ReplyState(AttachedOnDemand):
    """Of one request, as the engine core has told it so far."""

    trail: list[tuple[int, str | None]] | None = None
    """Its KV provenance; None if it was not asked for."""
    pooled_stamp: str | None = None
    """The version of the step that pooled it; None if it generates."""


@dataclass(slots=True)
class PooledVersion(AttachedOnDemand):
    """Of one answer that was pooled: an embedding, a score or a class."""

    stamp: str | None = None
    """The version of its step; None if the request was aborted."""
