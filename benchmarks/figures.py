"""From arrival times to figures; plain arithmetic on records.

A gap is the time between two arrivals of one stream. It belongs to an update if any
part of it lies between the call and `AFTER_S` past its return, and to steady decoding
if it lies wholly outside of every update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from benchmarks.record import Record, Update

AFTER_S = 0.25
"""What follows this soon after an update is counted as its doing."""

Gap = tuple[float, float]


@dataclass
class UpdateFigures:
    """One update beside the decoding around it."""

    seconds: float
    gap_max_ms: float
    gap_at_s: float
    """When that one began, from the call."""
    gap_alone_ms: float
    """Largest gap of a stretch as long as the update, just before it."""
    tokens_share: float
    """Tokens per second from call to return, as a share of those around it."""
    lost_s: float
    """Seconds of decoding that the update cost."""
    search_s: float = 0.0
    """Seconds of a trainer's search, before the engine's first call."""
    lost_search_s: float = 0.0
    """Seconds of decoding lost meanwhile. The other figures are without the search."""
    lost_after_s: float = 0.0
    """Seconds of decoding lost in the `AFTER_S` after the return."""


def gaps(record: Record) -> Iterator[Gap]:
    """Every gap of every stream, as its two ends."""
    for arrivals in record.arrivals:
        times = [at for at, _ in arrivals]
        yield from pairwise(times)


def update_figures(record: Record) -> list[UpdateFigures]:
    """The figures of every update of a round."""
    figures = []
    around = pairwise(_stretches(record))
    for whole, (before, later) in zip(record.updates, around, strict=True):
        alone_s = sum(end - start for start, end in (before, later))
        rate = (_tokens(record, before) + _tokens(record, later)) / alone_s
        called = whole.start if whole.called is None else whole.called
        search_s = called - whole.start
        found = _tokens(record, (whole.start, called))
        after = _tokens(record, (whole.end, whole.end + AFTER_S))
        update = replace(whole, start=called)
        seconds = update.end - update.start
        share = _tokens(record, (update.start, update.end)) / seconds / rate
        # The decode-only stretch ends where the update begins; it is shorter than
        # the update only if the whole stretch is.
        alone = (max(before[0], update.start - seconds), update.start)
        touching = (gap for gap in gaps(record) if _touches(gap, update))
        largest = max(touching, key=_length, default=(update.start, update.start))
        figures.append(
            UpdateFigures(
                seconds=seconds,
                gap_max_ms=1e3 * _length(largest),
                gap_at_s=largest[0] - update.start,
                gap_alone_ms=_longest(g for g in gaps(record) if _within(g, alone)),
                tokens_share=share,
                lost_s=seconds * (1 - share),
                search_s=search_s,
                lost_search_s=search_s - found / rate,
                lost_after_s=AFTER_S - after / rate,
            )
        )
    return figures


def kept_share(record: Record) -> float:
    """Tokens per second from the first update on, as a share of decoding alone.

    What a trainer's search costs on the same GPU is in it.
    """
    alone = _stretches(record)[1:]
    rate = sum(_tokens(record, each) for each in alone) / sum(map(_length, alone))
    whole = record.updates[0].start, record.ended
    return _tokens(record, whole) / _length(whole) / rate


def steady_gaps_ms(record: Record) -> list[float]:
    """The gaps of decoding alone, in milliseconds."""
    stretches = _stretches(record)
    return [
        1e3 * (gap[1] - gap[0])
        for gap in gaps(record)
        if any(_within(gap, stretch) for stretch in stretches)
    ]


def steady(records: list[Record]) -> dict[str, float]:
    """The figures of decoding alone, over all rounds of an arm.

    A round has the same streams from its first update to its last, and they get longer.
    A step takes longer with longer streams. So an arm whose updates take longer also
    decodes more slowly between them: `context_tokens` is the mean length that its
    streams had, and `tokens_per_s_before` is of decoding before the first update, where
    the streams of all arms are as long.
    """
    ordered = sorted(gap for record in records for gap in steady_gaps_ms(record))
    stretches = [(r, s) for r in records for s in _stretches(r)]
    tokens = sum(_tokens(record, stretch) for record, stretch in stretches)
    seconds = sum(end - start for _, (start, end) in stretches)
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_before": _before(records),
        "context_tokens": _context(records),
        "gap_steady_p50_ms": percentile(ordered, 50),
        "gap_steady_p99_ms": percentile(ordered, 99),
        "gap_steady_max_ms": ordered[-1],
    }


def _before(records: list[Record]) -> float:
    """Tokens per second of decoding before the first update of each round."""
    firsts = [(record, _stretches(record)[0]) for record in records]
    seconds = sum(end - start for _, (start, end) in firsts)
    return sum(_tokens(record, first) for record, first in firsts) / seconds


def _context(records: list[Record]) -> float:
    """Tokens that a stream had got, as a mean over the arrivals of decoding alone."""
    lengths = []
    for record in records:
        stretches = _stretches(record)
        for arrivals in record.arrivals:
            had = accumulate(number for _, number in arrivals)
            for (at, _), length in zip(arrivals, had, strict=True):
                if any(start < at <= end for start, end in stretches):
                    lengths.append(length)
    return sum(lengths) / max(1, len(lengths))


def summary(records: list[Record]) -> dict[str, Any]:
    """The figures of one arm, over all of its rounds."""
    updates = [figures for record in records for figures in update_figures(record)]
    return {
        **steady(records),
        "gap_alone_median_ms": median(u.gap_alone_ms for u in updates),
        "gap_update_median_ms": median(u.gap_max_ms for u in updates),
        "gap_update_max_ms": max(u.gap_max_ms for u in updates),
        "tokens_share": median(u.tokens_share for u in updates),
        "update_s": median(u.seconds for u in updates),
        "lost_s": median(u.lost_s for u in updates),
        "lost_search_s": median(u.lost_search_s for u in updates),
        "lost_after_s": median(u.lost_after_s for u in updates),
        "updates": [asdict(u) for u in updates],
    }


def percentile(ordered: list[float], percent: float) -> float:
    """The value that `percent` of all do not exceed."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _stretches(record: Record) -> list[Gap]:
    """Decoding alone: before the first update, between any two, after the last."""
    starts = [record.begun, *(u.end + AFTER_S for u in record.updates)]
    ends = [*(u.start for u in record.updates), record.ended]
    return list(zip(starts, ends, strict=True))


def _tokens(record: Record, stretch: Gap) -> int:
    start, end = stretch
    return sum(n for a in record.arrivals for at, n in a if start < at <= end)


def _touches(gap: Gap, update: Update) -> bool:
    return gap[1] > update.start and gap[0] < update.end + AFTER_S


def _within(gap: Gap, stretch: Gap) -> bool:
    return stretch[0] <= gap[0] and gap[1] <= stretch[1]


def _length(gap: Gap) -> float:
    return gap[1] - gap[0]


def _longest(chosen: Iterable[Gap]) -> float:
    return 1e3 * max(map(_length, chosen), default=0.0)
