"""Our state on one `AsyncLLM`: its heartbeat and its scrape of metrics.

`health.py` and `metrics.py` create these objects and store them here. Protocols declare
what others use of them, so that no module imports another in a circle.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from vllm.inflight.attached import AttachedOnDemand


class HealthCheck(Protocol):
    """The check of the engine cores, see `health.Heartbeat`."""

    async def check(self) -> None:
        """Raise `EngineDeadError` if the engine cores do not answer in time."""

    async def details(self) -> dict[str, str]:
        """What is wrong with the weights, and whether a pause is absorbed."""


class MetricsText(Protocol):
    """The metrics of the engine cores, see `metrics.Scrapes`."""

    async def text(self) -> bytes:
        """The metrics, in Prometheus format."""


@dataclass(slots=True)
class ClientState(AttachedOnDemand):
    """Calls to the engine cores that several requests share; None before the first."""

    heartbeat: HealthCheck | None = None
    scrapes: MetricsText | None = None
    probe: asyncio.Task[None] | None = None
