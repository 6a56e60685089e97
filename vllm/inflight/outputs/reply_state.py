"""Our state on a request of the front end, and on a pooled output."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.inflight import upstream
from vllm.inflight.attached import AttachedOnDemand


@dataclass(slots=True)
class ReplyState(AttachedOnDemand):
    """The versions of one request, as the engine core has reported them so far."""

    trail: list[tuple[int, str | None]] | None = None
    """Its KV provenance; None if it was not asked for."""
    pooled_stamp: str | None = None
    """The version of the step that pooled it; None if it generates."""
    starts: list[tuple[str, int]] = field(default_factory=list)
    """Stamp and first token of each span, in releases whose outputs have no spans."""

    def begin_span(self, stamp: str, num_tokens: int) -> None:
        """Begin a span behind `num_tokens` tokens, if the stamp is a new one."""
        if not self.starts or self.starts[-1][0] != stamp:
            self.starts.append((stamp, num_tokens))

    def spans(self, num_tokens: int) -> list[upstream.WeightVersionSpan] | None:
        """The spans over `num_tokens` tokens; None if no stamp was reported."""
        if not self.starts:
            return None if num_tokens else []
        ends = [*(start for _, start in self.starts[1:]), num_tokens]
        return [
            upstream.WeightVersionSpan(stamp, start, end)
            for (stamp, start), end in zip(self.starts, ends, strict=True)
        ]


@dataclass(slots=True)
class PooledVersion(AttachedOnDemand):
    """The version of one pooled output: an embedding, a score or a class."""

    stamp: str | None = None
    """The version of its step; None if the request was aborted."""
