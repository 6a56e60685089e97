"""The interface of our state on a scheduler, for the rest of the engine core.

`ServingState` in `scheduler.py` implements it. Protocols declare its parts, so that no
module imports another in a circle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, Protocol, overload

from vllm.inflight import upstream
from vllm.inflight.attached import Attached
from vllm.inflight.engine.scheduling.aborted_sessions import AbortedSessions
from vllm.inflight.engine.scheduling.kv_provenance import ProvenanceReports
from vllm.inflight.engine.scheduling.request_state import CacheNamespace
from vllm.inflight.update import Version
from vllm.inflight.worker.lora import Key


class CachePolicy(Protocol):
    """The namespaces of requests, see `prefix_cache.NamespacePolicy`."""

    @property
    def oldest(self) -> int | None:
        """Largest age of KV in epochs; None for `shared`."""

    @property
    def drift(self) -> float:
        """The largest sum of drifts of all updates in one namespace."""

    def roots(
        self, epoch: int, load: int = 0, *, is_retracted: bool = False
    ) -> Sequence[CacheNamespace]:
        """The namespaces where a request looks for KV in `epoch`, the newest first."""

    @overload
    def salted(self, user_salt: str, root: CacheNamespace) -> str: ...
    @overload
    def salted(self, user_salt: str | None, root: CacheNamespace) -> str | None: ...


class LoadedAdapters(Protocol):
    """The LoRA adapters of the engine core, see `lora.Adapters`."""

    def load(self, adapter: upstream.LoRARequest) -> None:
        """Count a load of `adapter`, if the workers are about to load it."""

    def load_of(self, adapter: upstream.LoRARequest) -> int:
        """The current or next load number of `adapter`; 0 without an adapter."""

    def keeps(self, adapter: upstream.LoRARequest) -> bool:
        """Whether the workers keep `adapter` and do not have to load it again."""

    def keep(self, key: Key) -> None:
        """Note that the workers keep an adapter, which is used now."""

    def needed(self, key: Key) -> list[Key]:
        """The adapters that workers have to keep when `key` is loaded."""

    def note_files(self, adapter: upstream.LoRARequest) -> None:
        """Note which files an adapter was loaded from."""

    def from_last_files(self, adapter: upstream.LoRARequest) -> Any:
        """The files to load for a request whose adapter is not in memory."""

    def drop(self, number: int) -> None:
        """Note that the workers have unloaded the adapter with this number."""


class WaitingQueues(Protocol):
    """The requests that do not run, see `waiting.WaitingRequests`."""

    def holding_kv(self) -> list[upstream.Request]:
        """Every waiting request with KV, the next one first."""


class SchedulerState(Attached, ABC):
    """Our state on one scheduler, and what the engine core does to its requests."""

    policy: CachePolicy
    adapters: LoadedAdapters
    reports: ProvenanceReports
    """The requests that ask for their KV provenance."""
    aborted: AbortedSessions
    cache_epoch: int
    """The cache epoch of new requests."""
    waiting: WaitingQueues
    """The requests in the queues."""
    late: list[upstream.Request]
    """Retracted requests whose last tokens have not arrived yet."""
    is_scheduling: bool
    """Whether a step is being scheduled."""

    @abstractmethod
    def serve(self, version: Version, cache_epoch: int, last_change: int) -> None:
        """Stamp the next steps with `version`."""

    @abstractmethod
    def retract(
        self, only: Collection[str] | None = None, *, besides: Collection[str] = ()
    ) -> int:
        """Send every request that holds KV back to the front of the queue, in order.

        Sampled tokens are kept. Prompt and output are prefilled again with the weights
        that are live then. Returns the number of retracted requests.

        Args:
            only: the ids of the running requests to retract; None for all requests.
            besides: the ids of requests that keep their KV.

        """

    @abstractmethod
    def sent_back(self) -> list[upstream.Request]:
        """Requests that have run, and wait in the queue after they lost their KV."""

    @abstractmethod
    def active(self) -> list[upstream.Request]:
        """Requests that hold KV and finish without further input.

        These are running requests, and waiting requests that get KV from a connector. A
        session between two inputs does not count.
        """

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether mode `wait` has to wait for requests."""
