"""What a server keeps of one `AsyncLLM`.

This file names the classes for mypy alone: their modules make the objects, and find
them here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.inflight.attached import AttachedOnDemand

if TYPE_CHECKING:
    from vllm.inflight.api.server.health import Heartbeat
    from vllm.inflight.api.server.metrics import Scrapes


@dataclass(slots=True)
class ClientState(AttachedOnDemand):
    """The questions that are put to its engine cores; None until they are needed."""

    heartbeat: Heartbeat | None = None
    scrapes: Scrapes | None = None
