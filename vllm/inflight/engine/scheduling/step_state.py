"""Our state on one step: its version stamps, and new names of media."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.inflight.attached import AttachedOnDemand


@dataclass(slots=True)
class StepState(AttachedOnDemand):
    """The state on one `SchedulerOutput`; both travel to the workers together."""

    stamp: str | None = None
    """The version of its tokens; see version_stamp.py."""
    kv_stamp: str | None = None
    """The version of the KV that it computes; None where there is no KV."""
    media: dict[str, list[str]] = field(default_factory=dict)
    """The names of the media of requests that resume, by id; see encoder_cache.py."""

    def __reduce__(self) -> tuple[object, ...]:  # every step is pickled
        return StepState, (self.stamp, self.kv_stamp, self.media)
