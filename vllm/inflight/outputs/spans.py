"""Spans: which version of the weights sampled which output tokens.

`weight_versions` is a list of `{"version", "epoch", "start", "end"}`, half-open
over output tokens, cumulative from the first token of a choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.stamp import Stamp


@dataclass
class VersionSpan(upstream.WeightVersionSpan):
    """Output tokens `[start, end)` were sampled by `version` in `epoch`."""

    epoch: int = 0


def decoded(spans: Iterable[Any] | None) -> list[VersionSpan] | None:
    """Upstream's spans, whose labels are stamps, as spans with epochs."""
    if spans is None:
        return None
    stamped = ((Stamp.decode(span.version), span) for span in spans)
    return [
        VersionSpan(stamp.label, span.start, span.end, stamp.epoch)
        for stamp, span in stamped
    ]


def as_dicts(spans: Iterable[Any] | None) -> list[dict[str, Any]] | None:
    """Spans as JSON-ready objects; None, "nobody knows", stays None."""
    if spans is None:
        return None
    # `dataclasses.asdict` copies deeply, ten times as slowly; this is per token.
    return [
        {
            "version": span.version,
            "epoch": span.epoch,
            "start": span.start,
            "end": span.end,
        }
        for span in spans
    ]
