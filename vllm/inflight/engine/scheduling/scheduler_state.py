"""What the rest of the engine core may use of our side of a scheduler.

`scheduler.py` has the class that does it. This file names the classes of its parts for
mypy alone, so that these parts can reach it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from vllm.inflight.attached import Attached

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.inflight import upstream
    from vllm.inflight.engine.scheduling.aborted_sessions import AbortedSessions
    from vllm.inflight.engine.scheduling.kv_provenance import ProvenanceReports
    from vllm.inflight.engine.scheduling.lora import Adapters
    from vllm.inflight.engine.scheduling.prefix_cache import NamespacePolicy
    from vllm.inflight.update import Version


class SchedulerState(Attached, ABC):
    """What we keep of one scheduler, and what we do to its requests."""

    policy: NamespacePolicy
    adapters: Adapters
    reports: ProvenanceReports
    """The requests that ask whose KV they read."""
    aborted: AbortedSessions
    cache_epoch: int
    """The change of the weights' bytes that began the root of new requests."""

    @abstractmethod
    def serve(self, version: Version, cache_epoch: int, last_change: int) -> None:
        """Stamp the steps from the next one on with `version`."""

    @abstractmethod
    def retract(self, only: Collection[str] | None = None) -> int:
        """Send every request that holds KV back to the front of the queue, in order.

        Tokens already sampled are kept; prompt and output are prefilled again
        under the weights then live. Returns how many were retracted.

        Args:
            only: the ids of running ones, if the others stay where they are.

        """

    @abstractmethod
    def sent_back(self) -> list[upstream.Request]:
        """Requests that have run and lie in the queue, as they had to give KV up."""

    @abstractmethod
    def active(self) -> list[upstream.Request]:
        """Requests that hold KV and go on by themselves.

        Those that run, and those that wait with KV from a tier or another engine, or
        for it. A session between two inputs goes on when its user does.
        """

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a `wait` has somebody to wait for."""
