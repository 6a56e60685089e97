"""A membership: a worker's place in one group that a trainer opened with torch alone.

Such a group has no handshake: the n-th broadcast goes to the n-th receive. One that
nobody receives would be read as the next one, and all after it one too late; so a group
ends with the first announcement that was not received to its end.
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
"""Announcements; that one was refused is told long before so many others came."""

MISSED = (
    "what the trainer broadcast for an announcement that was refused is still in it"
)


@dataclass
class Membership:
    """A worker's place in one group. One thread receives; any may end it."""

    name: str
    since: float
    """When the worker began to join, on the monotonic clock."""
    opening: Future[Group]
    left: threading.Event
    timeout_s: float
    slots: Buffers
    ended: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_receiving: bool = False
    _received: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _missed: set[str] = field(default_factory=set)

    @contextmanager
    def receiving(self, announcement: str) -> Iterator[None]:
        """Around all of an announcement; if it is left early, the group has ended.

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
        """An announcement was refused: unless it was received, the group has ended.

        Returns at once. What is being received of another one is received to its end.

        Args:
            announcement: its id.
            age_s: seconds since it was made. One that is older than this membership was
                made to a group of the same name before, which has ended.

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
        in_background(lambda: self.end(MISSED))  # NCCL takes its time

    def end(self, reason: str) -> None:
        """Leave for good, now or once the group is open; the first reason stays."""
        with self._lock:
            self.ended = self.ended or reason
            self._let_buffers_go()
        self.left.set()
        self.opening.add_done_callback(self._abort)

    def leave(self) -> None:
        """Leave in peace, with nothing under way; now or once the group is open."""
        self.ended = self.ended or "has left the group"
        self.left.set()
        self.opening.add_done_callback(_close)

    def _let_buffers_go(self) -> None:
        """Of a group that has ended, when nothing is received; with the lock held."""
        if self.ended is not None and not self._is_receiving:
            self.slots.clear()

    def _abort(self, opening: Future[Group]) -> None:
        if opening.exception() is None:
            opening.result().abort(self.ended or "has left the group")


def _close(opening: Future[Group]) -> None:
    if opening.exception() is None:
        opening.result().close()
