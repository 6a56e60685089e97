"""What a step is stamped with, and what it tells the workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.inflight.attached import AttachedOnDemand


@dataclass(slots=True)
class StepState(AttachedOnDemand):
    """Of one `SchedulerOutput`; it travels to the workers with it."""

    stamp: str | None = None
    """The version of its tokens; see version_stamp.py."""
    kv_stamp: str | None = None
    """The version of the KV that it computes; None where there is no KV."""
    media: dict[str, list[str]] = field(default_factory=dict)
    """The names of the media of requests that resume, by id; see encoder_cache.py."""

    def __reduce__(self) -> tuple[object, ...]:  # every step is pickled
        return StepState, (self.stamp, self.kv_stamp, self.media)
