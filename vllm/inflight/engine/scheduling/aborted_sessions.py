"""Aborted streaming sessions: later chunks of them must not begin a new request.

The front end may have sent a chunk before it knew of the abort. The session's context
is gone, so such a late chunk is dropped. The chunk may arrive at any later time, so the
ids of aborted sessions are remembered. The front end marks the first chunk of a
session, since a new session may have the same id.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.inflight import upstream
from vllm.inflight.attached import AttachedOnDemand

NUM_REMEMBERED = 1000

BEGINS = "inflight_begins"
"""The extra argument of a session's first chunk."""

SIGNAL = [0]
"""The prompt by which upstream's front end marks the end of a session's input."""


@dataclass(slots=True)
class SessionQueue(AttachedOnDemand):
    """Of the queue of one session's outputs, in the front end."""

    has_begun: bool = False
    """Whether its first chunk has been sent."""


def mark(request: upstream.Request) -> None:
    """Mark the first chunk of a session, in the front end."""
    params = request.sampling_params
    params.extra_args = {**(params.extra_args or {}), BEGINS: True}


class AbortedSessions:
    """The last aborted sessions of one scheduler."""

    def __init__(self) -> None:
        self._arrivals: dict[str, float] = {}
        """The arrival time of the last accepted chunk, by id; the oldest id first."""

    def add(self, session: upstream.Request) -> None:
        """Remember `session`, in place of the oldest."""
        self.forget(session)
        self._arrivals[session.request_id] = session.arrival_time
        if len(self._arrivals) > NUM_REMEMBERED:
            del self._arrivals[next(iter(self._arrivals))]

    def forget(self, request: upstream.Request) -> None:
        """Forget a session: its id is reused, or no more chunks come."""
        self._arrivals.pop(request.request_id, None)

    def is_late(self, request: upstream.Request) -> bool:
        """Whether `request` is a late chunk, not of a new session with the same id."""
        arrival = self._arrivals.get(request.request_id)
        if arrival is None:
            return False
        if request.resumable and not _begins(request):
            return True
        self.forget(request)  # a new session, or the last chunk of the old one
        # The front end creates the end marker before the first chunk.
        is_signal = not request.resumable and request.prompt_token_ids == SIGNAL
        return bool(is_signal and request.arrival_time <= arrival)


def _begins(request: upstream.Request) -> bool:
    return BEGINS in (request.sampling_params.extra_args or {})
