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
    made = []  # a plain loop: per token and stream, the quickest there is
    for span in spans:
        stamp = Stamp.decode(span.version)
        made.append(VersionSpan(stamp.label, span.start, span.end, stamp.epoch))
    return made


def followed(trail: Iterable[Any], end: int) -> list[VersionSpan]:
    """A trail of KV as spans over the positions [0, `end`) of prompt and output.

    Where nobody knows the version, the label is empty and the epoch -1.
    """
    starts = [(start, stamp) for start, stamp in trail if start < end]
    ends = [start for start, _ in starts[1:]] + [end]
    known = (Stamp("", -1) if s is None else Stamp.decode(s) for _, s in starts)
    return [
        VersionSpan(stamp.label, start, stop, stamp.epoch)
        for stamp, (start, _), stop in zip(known, starts, ends, strict=True)
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
