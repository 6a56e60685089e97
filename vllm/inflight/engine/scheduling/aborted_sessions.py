"""Sessions that were aborted: what their front end had sent before it knew.

Their context is gone, so a chunk that comes late begins no request. How late cannot be
told: it may wait for as long as a step takes. So it is not the time that is remembered,
but whose they were; and the front end marks the chunk that begins a session, since
another may have the same id.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.inflight import upstream
from vllm.inflight.attached import AttachedOnDemand

NUM_REMEMBERED = 1000

BEGINS = "inflight_begins"
"""The extra argument of a session's first chunk."""

SIGNAL = [0]
"""The prompt with which upstream's front end says that a session's input has ended."""


@dataclass(slots=True)
class SessionQueue(AttachedOnDemand):
    """Of the queue of one session's outputs, in the front end."""

    has_begun: bool = False
    """Whether its first chunk has been sent."""


def mark(request: upstream.Request) -> None:
    """Have this chunk, as the front end sends it, begin a session."""
    params = request.sampling_params
    params.extra_args = {**(params.extra_args or {}), BEGINS: True}


class AbortedSessions:
    """The aborted sessions of one scheduler, as many as are remembered."""

    def __init__(self) -> None:
        self._arrivals: dict[str, float] = {}
        """Id → when the last chunk that it had taken up was made; the oldest first."""

    def add(self, session: upstream.Request) -> None:
        """Remember `session`, in place of the oldest."""
        self.forget(session)
        self._arrivals[session.request_id] = session.arrival_time
        if len(self._arrivals) > NUM_REMEMBERED:
            del self._arrivals[next(iter(self._arrivals))]

    def forget(self, request: upstream.Request) -> None:
        """Its id is another's now, or nothing more comes for it."""
        self._arrivals.pop(request.request_id, None)

    def is_late(self, request: upstream.Request) -> bool:
        """Whether `request` is of such a session, and not another of the same id."""
        arrival = self._arrivals.get(request.request_id)
        if arrival is None:
            return False
        if request.resumable and not _begins(request):
            return True
        self.forget(request)  # a new one, or the last of it
        # The end of the input is made in advance, before the first chunk.
        is_signal = not request.resumable and request.prompt_token_ids == SIGNAL
        return bool(is_signal and request.arrival_time <= arrival)


def _begins(request: upstream.Request) -> bool:
    return BEGINS in (request.sampling_params.extra_args or {})
