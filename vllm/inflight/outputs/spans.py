"""Version spans: which version of the weights sampled which output tokens.

`weight_versions` is a list of `{"version", "epoch", "start", "end"}`. A span is
half-open over output tokens; the list covers all tokens of a choice from its first one
on. With an adapter, spans also have its name (`adapter`) and which load of it was used
(`adapter_load`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.version_stamp import Stamp

FIELDS = ("version", "epoch", "start", "end")
ADAPTER_FIELDS = (*FIELDS, "adapter", "adapter_load")


@dataclass
class VersionSpan(upstream.WeightVersionSpan):
    """Output tokens `[start, end)` were sampled by `version` in `epoch`.

    `span["version"]` is `span.version`, and `dict(span)` is the object of an HTTP
    reply, so the same code reads the spans of both.
    """

    epoch: int = 0

    def keys(self) -> tuple[str, ...]:
        """The fields, in the order of an HTTP reply."""
        return FIELDS

    def __getitem__(self, field: str) -> Any:
        if field not in self.keys():
            raise KeyError(field)
        return getattr(self, field)


@dataclass
class AdapterSpan(VersionSpan):
    """Output tokens that were sampled with an adapter."""

    adapter: str = ""
    """The name of the adapter."""
    adapter_load: int = 0
    """How often the adapter had been loaded again under that name."""

    def keys(self) -> tuple[str, ...]:
        """The fields, in the order of an HTTP reply."""
        return ADAPTER_FIELDS


def decoded(
    spans: Sequence[upstream.WeightVersionSpan] | None,
    adapter: upstream.LoRARequest | None = None,
) -> list[VersionSpan] | None:
    """Spans with epochs, from upstream's spans, whose labels are version stamps.

    Args:
        spans: the spans of one request.
        adapter: the adapter of the request, if it has one.

    """
    if spans is None:
        return None
    # This runs for every token of every stream, and nearly all of them have one span.
    if adapter is None and len(spans) == 1:
        (span,) = spans
        stamp = Stamp.decode(span.version)
        return [VersionSpan(stamp.label, span.start, span.end, stamp.epoch)]
    made: list[VersionSpan] = []
    for span in spans:
        stamp = Stamp.decode(span.version)
        found = VersionSpan(stamp.label, span.start, span.end, stamp.epoch)
        if adapter is not None:
            load = stamp.load_of(adapter.lora_name, adapter.lora_int_id)
            facts = found.version, found.start, found.end, found.epoch
            found = AdapterSpan(*facts, adapter.lora_name, load)
        if made and _continues(made[-1], found):
            made[-1].end = found.end  # the stamps differ in another request's adapter
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


def followed(
    provenance: Iterable[tuple[int, str | None]], end: int
) -> list[VersionSpan]:
    """KV provenance as spans over the positions [0, `end`) of prompt and output.

    Args:
        provenance: (first position, version stamp) of each stretch of positions. An
            unknown version is None; its span has an empty label and epoch -1.
        end: the number of positions.

    """
    starts = [(start, stamp) for start, stamp in provenance if start < end]
    ends = [start for start, _ in starts[1:]] + [end]
    known = (Stamp("", -1) if s is None else Stamp.decode(s) for _, s in starts)
    return [
        VersionSpan(stamp.label, start, stop, stamp.epoch)
        for stamp, (start, _), stop in zip(known, starts, ends, strict=True)
    ]


def as_dicts(spans: Iterable[VersionSpan] | None) -> list[dict[str, Any]] | None:
    """Spans as JSON-ready objects; None, for unknown versions, stays None."""
    if spans is None:
        return None
    # This runs per token, and `dataclasses.asdict` is ten times as slow.
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


def as_object(span: VersionSpan | dict[str, Any]) -> dict[str, Any]:
    """A span as Pydantic writes it: one of ours, or its JSON-ready object."""
    return dict(span)
