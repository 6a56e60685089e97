"""What a server keeps of one `AsyncLLM`.

`health.py` and `metrics.py` make the objects and find them here. What is used of them
is declared by protocols, so that no module imports another in a circle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm.inflight.attached import AttachedOnDemand


class HealthCheck(Protocol):
    """The check of the engine cores, see `health.Heartbeat`."""

    async def check(self) -> None:
        """Raise `EngineDeadError` if the engine cores do not answer in time."""

    async def reason(self) -> str | None:
        """What is wrong with the weights; None if nothing is."""


class MetricsText(Protocol):
    """The metrics of the engine cores, see `metrics.Scrapes`."""

    async def text(self) -> bytes:
        """The metrics, in Prometheus format."""


@dataclass(slots=True)
class ClientState(AttachedOnDemand):
    """The calls to its engine cores that requests share; None until the first one."""

    heartbeat: HealthCheck | None = None
    scrapes: MetricsText | None = None
