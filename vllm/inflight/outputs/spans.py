"""Spans: which version of the weights sampled which output tokens.

`weight_versions` is a list of `{"version", "epoch", "start", "end"}`, half-open
over output tokens, cumulative from the first token of a choice. With an adapter, spans
also have its name (`adapter`) and which load of it was used (`adapter_load`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.version_stamp import Stamp


@dataclass
class VersionSpan(upstream.WeightVersionSpan):
    """Output tokens `[start, end)` were sampled by `version` in `epoch`."""

    epoch: int = 0


@dataclass
class AdapterSpan(VersionSpan):
    """Those tokens were sampled with an adapter."""

    adapter: str = ""
    """Its name."""
    adapter_load: int = 0
    """How often it had been loaded again under that name."""


def decoded(
    spans: Iterable[Any] | None, adapter: Any = None
) -> list[VersionSpan] | None:
    """Upstream's spans, whose labels are stamps, as spans with epochs.

    Args:
        spans: of one request.
        adapter: its `LoRARequest`, if it has one.

    """
    if spans is None:
        return None
    made: list[VersionSpan] = []
    for span in spans:  # a plain loop: per token and stream, the quickest there is
        stamp = Stamp.decode(span.version)
        found = VersionSpan(stamp.label, span.start, span.end, stamp.epoch)
        if adapter is not None:
            load = stamp.load_of(adapter.lora_name, adapter.lora_int_id)
            facts = found.version, found.start, found.end, found.epoch
            found = AdapterSpan(*facts, adapter.lora_name, load)
        if made and _continues(made[-1], found):
            made[-1].end = found.end  # an adapter was replaced that is another's
        else:
            made.append(found)
    return made


def _continues(before: VersionSpan, after: VersionSpan) -> bool:
    return (before.version, before.epoch, _load(before)) == (
        after.version,
        after.epoch,
        _load(after),
    )


def _load(span: VersionSpan) -> int | None:
    return span.adapter_load if isinstance(span, AdapterSpan) else None


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
            **(
                {"adapter": span.adapter, "adapter_load": span.adapter_load}
                if isinstance(span, AdapterSpan)
                else {}
            ),
        }
        for span in spans
    ]
