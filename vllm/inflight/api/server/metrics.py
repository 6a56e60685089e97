"""`/metrics`: upstream's metrics, and then those of weight updates.

The route needs no key, as upstream's. Each answer of an engine costs time of its main
loop, so concurrent scrapes share one answer, and so do scrapes soon after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from vllm.inflight import upstream
from vllm.inflight.api.control.core_client import AsyncCoreClient
from vllm.inflight.api.server.client_state import ClientState
from vllm.inflight.calls import ReadMetrics
from vllm.inflight.engine.counters import GAP_EDGES_MS

ANSWER_TIMEOUT_S = 2.0
"""A reply leaves out the engines that have not answered after so many seconds."""

FRESH_S = 0.1
"""Seconds for which an answer is reused; less than any scraper's interval."""

logger = upstream.init_logger(__name__)


class Scrapes:
    """The metrics of the engine cores behind one client."""

    def __init__(self, engine_core: upstream.EngineCoreClient) -> None:
        self._client = AsyncCoreClient(engine_core)
        self._question: asyncio.Task[bytes] | None = None
        self._text, self._stale_at = b"", 0.0

    async def text(self) -> bytes:
        """The metrics of weight updates, at most `FRESH_S` old.

        All waiting scrapes share one call to the engines.
        """
        if time.monotonic() < self._stale_at:
            return self._text
        if self._question is None:
            self._question = asyncio.create_task(self._ask())
            self._question.add_done_callback(self._answered)
        # A scraper that disconnects must not cancel the answer for the others.
        return await asyncio.shield(self._question)

    def _answered(self, question: asyncio.Task[bytes]) -> None:
        self._question = None
        if not question.cancelled() and question.exception() is None:
            self._text = question.result()
            self._stale_at = time.monotonic() + FRESH_S

    async def _ask(self) -> bytes:
        replies = {}
        answers = await self._client.call_each(ReadMetrics(), ANSWER_TIMEOUT_S)
        for number, answer in enumerate(answers):
            if "error" in answer:
                why = answer["error"]["message"]
                logger.warning("engine %d did not report its metrics: %s", number, why)
            else:
                replies[number] = answer["ok"]
        return exposition(replies)


async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    engine = request.app.state.engine_client
    state = ClientState.of(engine)
    if (found := state.scrapes) is None:
        found = state.scrapes = Scrapes(engine.engine_core)
    text = generate_latest(upstream.get_prometheus_registry()) + await found.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


PREFIX = "vllm:inflight_"
ENGINE = "engine"

GAUGES = {
    "epoch": "Epoch of the live weights; grows at every commit and rollback.",
    "paused": "Whether decoding is paused.",
    "pause_absorbed": "Whether a pause is absorbed, and decoding goes on.",
    "weights_differ": "Whether a scrub found live weights that differ from their "
    "digest.",
    "updating": "Whether an update is under way.",
    "update_staged_bytes": "Bytes that the update under way has staged so far.",
    "update_stalled_seconds": "Seconds since the last progress of the update.",
    "wire_window_bytes": "Most bytes in flight at once on the transport.",
    "wire_bucket_wait_ms": "Milliseconds that the receiver waited for the last bucket.",
}
COUNTERS = {
    "staging_seconds": ("staging_s", "Seconds spent staging committed versions."),
    "staged_bytes": ("staged_bytes", "Bytes of committed versions, of all ranks."),
    "rollbacks": ("rollbacks", "Flips back to the rollback target."),
    "pauses_absorbed": ("pauses_absorbed", "Pauses that were absorbed."),
    "lease_expiries": ("leases_expired", "Pauses that ended with their lease."),
}
KINDS = {
    "updates": ("outcomes", "outcome", "Updates that have ended, by outcome."),
    "scrubs": ("scrubs", "result", "Scrubs of the live weights, by result."),
    "out_of_band_writes": (
        "outside_writes",
        "call",
        "Writes into live weights outside of any update, by the call that made them.",
    ),
    "requests": (
        "requests",
        "what",
        "Requests that pauses and commits have stopped.",
    ),
    "pauses_enforced": (
        "pauses_enforced",
        "need",
        "Absorbed pauses that took force, by what needed them.",
    ),
    "pause_seconds": ("pause_s", "mode", "Seconds of ended pauses, by mode."),
}


def exposition(engines: Mapping[int, dict[str, Any]]) -> bytes:
    """The text of all metrics.

    Args:
        engines: engine number → its reply to the call `metrics`.

    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(engines))
    return generate_latest(registry)


class _Families:
    def __init__(self, engines: Mapping[int, dict[str, Any]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        """The metrics, for a registry."""
        yield from self._gauges()
        yield from self._counters()
        yield self._gaps()
        info = GaugeMetricFamily(
            f"{PREFIX}weights_info",
            "The live version, as labels.",
            labels=[ENGINE, "version", "digest"],
        )
        for number, engine in self._engines.items():
            labels = [str(number), engine["weight_version"], engine["digest"] or ""]
            info.add_metric(labels, 1)
        yield info

    def _gauges(self) -> Iterator[Metric]:
        drift = GaugeMetricFamily(
            f"{PREFIX}drift",
            "Drift of the weights at the last commit, relative to their norm.",
            labels=[ENGINE],
        )
        for number, engine in self._engines.items():
            if engine["drift"] is not None:
                drift.add_metric([str(number)], engine["drift"])
        yield drift
        for name, help_text in GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", help_text, labels=[ENGINE])
            for number, engine in self._engines.items():
                gauge.add_metric([str(number)], float(engine[name]))
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        for name, (key, help_text) in COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}{name}", help_text, labels=[ENGINE])
            for number, engine in self._engines.items():
                counter.add_metric([str(number)], engine[key])
            yield counter
        for name, (key, label, help_text) in KINDS.items():
            counter = CounterMetricFamily(
                f"{PREFIX}{name}", help_text, labels=[ENGINE, label]
            )
            for number, engine in self._engines.items():
                for kind, value in sorted(engine[key].items()):
                    counter.add_metric([str(number), kind], value)
            yield counter

    def _gaps(self) -> Metric:
        family = HistogramMetricFamily(
            f"{PREFIX}commit_gap_milliseconds",
            "Milliseconds between two steps in which an engine changed its version.",
            labels=[ENGINE],
        )
        for number, engine in self._engines.items():
            edges = [*map(str, GAP_EDGES_MS), "+Inf"]
            total, buckets = 0, []
            for edge, count in zip(edges, engine["gaps"], strict=True):
                total += count
                buckets.append((edge, total))
            family.add_metric([str(number)], buckets, engine["gap_ms"])
        return family
