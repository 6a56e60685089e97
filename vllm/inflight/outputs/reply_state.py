"""Our state on a request of the front end, and on a pooled output."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.inflight.attached import AttachedOnDemand


@dataclass(slots=True)
class ReplyState(AttachedOnDemand):
    """The versions of one request, as the engine core has reported them so far."""

    trail: list[tuple[int, str | None]] | None = None
    """Its KV provenance; None if it was not asked for."""
    pooled_stamp: str | None = None
    """The version of the step that pooled it; None if it generates."""


@dataclass(slots=True)
class PooledVersion(AttachedOnDemand):
    """The version of one pooled output: an embedding, a score or a class."""

    stamp: str | None = None
    """The version of its step; None if the request was aborted."""
