"""A membership: a worker's place in one group that a trainer opened with torch alone.

Such a group has no handshake: the n-th broadcast goes to the n-th receive. If a worker
missed one broadcast, it would read every later one as the one before. So the group ends
with the first announced update that was not received completely.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.buckets.buffers import Buffers
from vllm.inflight.transport.group import Group
from vllm.inflight.transport.waiting import in_background

REMEMBERED = 256
"""How many announcement ids are remembered. A rejection arrives long before so many
other announcements."""

MISSED = (
    "the trainer broadcast tensors for an announcement that was refused, and no worker "
    "received them"
)


@dataclass
class Membership:
    """A worker's place in one group. One thread receives; any thread may end it."""

    name: str
    since: float
    """When the worker began to join, on the monotonic clock, in seconds."""
    opening: Future[Group]
    """Done once the group is open."""
    left: threading.Event
    """Set once the worker has left."""
    timeout_s: float
    slots: Buffers
    """The buffers that broadcasts are received into."""
    ended: str | None = None
    """Why the group has ended; None while it can be used."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_receiving: bool = False
    _received: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _missed: set[str] = field(default_factory=set)

    @contextmanager
    def receiving(self, announcement: str) -> Iterator[None]:
        """A context around receiving one announced update; an error ends the group.

        Args:
            announcement: the id of the update's call.

        Raises:
            TransferFault: the group has ended before.

        """
        with self._lock:
            if self.ended is not None:
                raise TransferFault(
                    f"group {self.name!r} has ended: {self.ended}; let the trainer "
                    "open a new one and have the workers join it, with POST "
                    "/init_weights_update_group or PipelineRL's own call"
                )
            self._is_receiving = True
        try:
            yield
            self._received.append(announcement)
        except BaseException as error:
            self.end(f"stopped receiving: {error or type(error).__name__}")
            raise
        finally:
            with self._lock:
                self._is_receiving = False
                is_behind = bool(self._missed.difference(self._received))
                self._missed.clear()
                self._let_buffers_go()
            if is_behind:
                self.end(MISSED)

    def miss(self, announcement: str, age_s: float) -> None:
        """End the group because an announced update was rejected and not received.

        Does nothing if it was received. This returns at once. If another update is
        being received, the group ends after it.

        Args:
            announcement: the id of the rejected call.
            age_s: seconds since the call. A call that is older than this membership
                meant an earlier group of the same name, which has ended.

        """
        if age_s > time.monotonic() - self.since:
            return
        with self._lock:
            if self._is_receiving:
                self._missed.add(announcement)
                return
            if announcement in self._received:
                return
            self.ended = self.ended or MISSED
        in_background(lambda: self.end(MISSED))  # NCCL may take long

    def end(self, reason: str) -> None:
        """Abort the group, now or once it is open; the first reason is kept."""
        with self._lock:
            self.ended = self.ended or reason
            self._let_buffers_go()
        self.left.set()
        self.opening.add_done_callback(self._abort)

    def leave(self) -> None:
        """Leave while no broadcast is under way, now or once the group is open."""
        self.ended = self.ended or "has left the group"
        self.left.set()
        self.opening.add_done_callback(_close)

    def _let_buffers_go(self) -> None:
        """Free the buffers of a group that has ended and is idle. Needs the lock."""
        if self.ended is not None and not self._is_receiving:
            self.slots.clear()

    def _abort(self, opening: Future[Group]) -> None:
        if opening.exception() is None:
            opening.result().abort(self.ended or "has left the group")


def _close(opening: Future[Group]) -> None:
    if opening.exception() is None:
        opening.result().close()
