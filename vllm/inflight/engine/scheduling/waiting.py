"""The waiting requests of a scheduler, whichever queues its release of vLLM has.

Some waiting requests hold KV: a connector loads it for them, or a session keeps it
between two inputs. The others have none and are admitted when there is room.

| vLLM | requests with KV | the others | while new requests are held back |
|---|---|---|---|
| from 0.32 | `kv_holding_waiting` | `waiting` | those with KV are admitted |
| 0.31 | `kv_holding_waiting` | `waiting` | no waiting request is admitted |
| before 0.31 | `skipped_waiting`, `waiting` | the same queues | the same |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState


class WaitingRequests:
    """The waiting requests of one scheduler, in vLLM from 0.32 on."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def all(self) -> list[upstream.Request]:
        """Every waiting request without KV, the next one first."""
        return list(self._scheduler.waiting)

    def holding_kv(self) -> list[upstream.Request]:
        """Every waiting request with KV, the next one first."""
        return list(self._scheduler.kv_holding_waiting)

    def sent_back(self) -> list[upstream.Request]:
        """Requests that have run, and wait after they lost their KV."""
        return [request for request in self.all() if is_sent_back(request)]

    def uncounted(self) -> list[upstream.Request]:
        """Those that go on while new ones are held back, and that nobody counts."""
        return self.sent_back()

    def drop_kv(self, requests: Collection[upstream.Request]) -> None:
        """Move requests with KV in front of those without; the caller frees the KV."""
        self._scheduler.kv_holding_waiting.remove_requests(requests)
        self._put_in_front(requests)

    @contextmanager
    def sent_back_first(self) -> Iterator[None]:
        """During a step, schedule preempted requests while new ones are held back.

        Upstream would hold them back like new requests. Then mode `wait` would not wait
        for them, and they could go on under other weights.
        """
        waiting = self._scheduler.waiting
        admitted = self._scheduler.kv_holding_waiting
        sent_back = self.sent_back()
        if not sent_back:
            yield
            return
        waiting.remove_requests(sent_back)
        for request in sent_back:
            admitted.add_request(request)
        try:
            yield
        finally:
            left = self.sent_back()  # preempted in this step, or skipped
            left += [r for r in sent_back if r in admitted and is_sent_back(r)]
            admitted.remove_requests(left)
            waiting.remove_requests(left)
            self._put_in_front(left)

    def _put_in_front(self, requests: Collection[upstream.Request]) -> None:
        for request in reversed(list(requests)):
            self._scheduler.waiting.prepend_request(request)


class HeldBackRequests(WaitingRequests):
    """The waiting requests of vLLM 0.31, where a held back step admits none.

    Such a step is scheduled as if requests were not held back, with the admitted ones
    alone in the queues.
    """

    def uncounted(self) -> list[upstream.Request]:
        """Those that go on while new ones are held back, and that nobody counts."""
        idle = upstream.RequestStatus.WAITING_FOR_STREAMING_REQ
        return [*self.sent_back(), *(r for r in self.holding_kv() if r.status != idle)]

    @contextmanager
    def sent_back_first(self) -> Iterator[None]:
        """During a step, schedule preempted requests and those with KV alone."""
        if not self.sent_back() and not self.holding_kv():
            yield
            return
        with self._as_if_admitted(), super().sent_back_first():
            scheduler, waiting = self._scheduler, self._scheduler.waiting
            scheduler.waiting = upstream.create_request_queue(scheduler.policy)
            try:
                yield
            finally:
                added, scheduler.waiting = list(scheduler.waiting), waiting
                self._put_in_front(added)

    @contextmanager
    def _as_if_admitted(self) -> Iterator[None]:
        # Not by `set_pause_state`, which logs each time.
        before = self._scheduler._pause_state
        self._scheduler._pause_state = upstream.PauseState.UNPAUSED
        try:
            yield
        finally:
            self._scheduler._pause_state = before


class SkippedRequests(HeldBackRequests):
    """The waiting requests of vLLM before 0.31, where KV does not choose the queue.

    `skipped_waiting` has the requests that a step could not admit, with KV or without.
    Upstream looks there first. `waiting` has the others. Among them is a session whose
    next input came before its last one was done: it keeps its KV.
    """

    def all(self) -> list[upstream.Request]:
        """Every waiting request without KV, the next one first."""
        return [request for request in self._queued() if not _holds_kv(request)]

    def holding_kv(self) -> list[upstream.Request]:
        """Every waiting request with KV, the next one first."""
        return [request for request in self._queued() if _holds_kv(request)]

    def drop_kv(self, requests: Collection[upstream.Request]) -> None:
        """Move requests with KV in front of those without; the caller frees the KV."""
        self._scheduler.skipped_waiting.remove_requests(requests)
        self._scheduler.waiting.remove_requests(requests)
        self._put_in_front(requests)

    def _queued(self) -> Iterator[upstream.Request]:
        return chain(self._scheduler.skipped_waiting, self._scheduler.waiting)

    @contextmanager
    def sent_back_first(self) -> Iterator[None]:
        """During a step, schedule preempted requests and those with KV alone."""
        admitted = [*self.sent_back(), *self.holding_kv()]
        if not admitted:
            yield
            return
        scheduler = self._scheduler
        names = {each.request_id for each in admitted}
        others = [each for each in self.all() if each.request_id not in names]
        queues = scheduler.skipped_waiting, scheduler.waiting
        for name, chosen in (("skipped_waiting", admitted), ("waiting", ())):
            queue = upstream.create_request_queue(scheduler.policy)
            for request in chosen:
                queue.add_request(request)
            setattr(scheduler, name, queue)
        try:
            with self._as_if_admitted():
                yield
        finally:
            preempted, with_kv = list(self.all()), self.holding_kv()
            scheduler.skipped_waiting, scheduler.waiting = queues
            for queue, left in zip(
                queues, (with_kv, [*preempted, *others]), strict=True
            ):
                queue.remove_requests(list(queue))
                for request in left:
                    queue.add_request(request)


def is_sent_back(request: upstream.Request) -> bool:
    """Whether a request has run, and has lost its KV."""
    return bool(request.status == upstream.RequestStatus.PREEMPTED)


def _holds_kv(request: upstream.Request) -> bool:
    # The KV of a request counts while it arrives, which its position does not show.
    arriving = upstream.RequestStatus.WAITING_FOR_REMOTE_KVS
    return bool(request.num_computed_tokens > 0 or request.status == arriving)


class InOrder:
    """A mixin of the scheduler: no request overtakes one whose last tokens are pending.

    Upstream skips a retracted request until the outputs of the steps in flight have
    arrived, and would admit the next ones.
    """

    def _handle_blocked_waiting_request(self, request: upstream.Request) -> bool:
        late = SchedulerState.of(self).late
        if late and request not in late:
            return False
        return bool(super()._handle_blocked_waiting_request(request))  # type: ignore[misc]


class InOrderByStatus:
    """The same in vLLM before 0.31, which asks first whether a status is blocked."""

    def _is_blocked_waiting_status(self, status: upstream.RequestStatus) -> bool:
        state = SchedulerState.of(self)
        if state.is_scheduling and state.late:
            return True
        return bool(super()._is_blocked_waiting_status(status))  # type: ignore[misc]

    def _try_promote_blocked_waiting_request(self, request: upstream.Request) -> bool:
        late = SchedulerState.of(self).late
        if late and request not in late:
            return False
        if not super()._is_blocked_waiting_status(request.status):  # type: ignore[misc]
            return True
        return bool(super()._try_promote_blocked_waiting_request(request))  # type: ignore[misc]
