"""Pause modes: what happens to requests when decoding stops or weights change.

| mode     | running requests                 | their KV | waiting requests |
|----------|----------------------------------|----------|------------------|
| in_place | frozen where they are            | kept     | queued           |
| retract  | back to the front of the queue   | freed    | queued           |
| abort    | finished now, with what they have| freed    | finished too     |
| wait     | run to their end                 | –        | queued           |

A pause takes effect between two steps. A commit treats requests the same way
but stops nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.lease import Lease, lease_owner, lease_seconds
from vllm.inflight.errors import PauseConflict
from vllm.inflight.update import PauseMode

STRICTNESS = [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT]
"""A pause may become stricter; what it has let go of does not come back."""


class Pauses:
    """The pause of one engine core, if there is one."""

    def __init__(self, core: Any, gate: Any, *, lease_s: float) -> None:
        self._core = core
        self._gate = gate
        self._mode: PauseMode | None = None
        self._lease = Lease(gate.turns.submit, self._go_on)
        self._lease_s = lease_s

    @property
    def is_paused(self) -> bool:
        """Whether decoding stands still or is about to."""
        return bool(self._core.is_scheduler_paused())

    def pause(
        self,
        mode: PauseMode,
        *,
        flush_cache: bool,
        lease_s: Any = None,
        owner: Any = None,
    ) -> Any:
        """Pause, or renew the lease; replies when the mode has taken effect."""
        started = time.perf_counter()
        owner, seconds = lease_owner(owner), lease_seconds(lease_s, self._lease_s)
        if self.is_paused:
            self._lease.check(owner)
        if self.is_paused and self._mode is not None and _is_looser(mode, self._mode):
            raise PauseConflict(
                f"the engine is paused {self._mode.value}; that cannot become "
                f"{mode.value}: continue first"
            )
        scheduler = self._core.scheduler
        self._check_flush(mode, flush_cache)
        self._mode = mode
        num_aborted = 0
        if mode is PauseMode.WAIT:
            if self._gate.in_process and scheduler.running:
                self._mode = None
                raise PauseConflict(
                    "mode 'wait' needs an engine of its own process; here, finish "
                    "generate() first"
                )
            if self._gate.in_process:
                scheduler.set_pause_state(upstream.PauseState.PAUSED_NEW)
                pending = None
            else:
                pending = self._core.pause_scheduler("wait", False)
        elif mode is PauseMode.ABORT:
            num_aborted = self._abort_all()
            pending = self._core.pause_scheduler("abort", False)
        else:
            pending = self._core.pause_scheduler("keep", False)
        self._lease.take(owner, seconds)

        def settle() -> dict[str, Any]:
            if mode is PauseMode.RETRACT:
                scheduler.inflight_retract()
            if flush_cache:
                self.flush()
            return self._reply(started) | {"num_aborted": num_aborted}

        return _then(pending, settle)

    def resume(self, owner: Any = None) -> dict[str, Any]:
        """Go on, on whatever weights are live."""
        started = time.perf_counter()
        if self.is_paused:
            self._lease.check(lease_owner(owner))
        self._lease.drop()
        self._go_on()
        return self._reply(started)

    def state(self) -> dict[str, Any]:
        """Whether decoding stands still, in which mode, whose it is and how long."""
        mode = self._mode if self.is_paused else None
        return {
            "is_paused": self.is_paused,
            "mode": mode and mode.value,
            "owner": self._lease.owner,
            "lease_left_s": self._lease.left_s,
            "leases_expired": self._lease.num_expired,
        }

    def close(self) -> None:
        """No lease outlives its engine."""
        self._lease.drop()

    def _go_on(self) -> None:
        self._mode = None
        self._core.resume_scheduler()
        # A loop that was idle would go on waiting for its input queue.
        self._gate.rouse()

    def flush(self) -> None:
        """Drop the prefix cache, the connector's and the encoder's."""
        self._core._reset_caches(reset_running_requests=False, reset_connector=True)

    def _check_flush(self, mode: PauseMode, flush_cache: bool) -> None:
        if flush_cache and mode is PauseMode.IN_PLACE and self._core.scheduler.running:
            raise PauseConflict(
                "flush_cache cannot drop the KV of requests that stay in place; "
                "use mode 'retract'"
            )

    def check_commit(self, mode: PauseMode, *, flush_cache: bool = False) -> None:
        """Raise if a commit cannot treat requests as `mode` says, here and now."""
        self._check_flush(mode, flush_cache)
        if mode is PauseMode.WAIT and self.is_paused and self._core.scheduler.running:
            raise PauseConflict(
                "mode 'wait' would wait for ever: running requests are paused"
            )
        if (
            mode is PauseMode.WAIT
            and self._gate.in_process
            and self._core.scheduler.running
        ):
            raise PauseConflict(
                "mode 'wait' needs an engine of its own process; here, finish "
                "generate() first"
            )

    def between_requests(
        self, mode: PauseMode, switch: Callable[[], dict[str, Any]]
    ) -> Any:
        """Run `switch` now, or for `wait` once the running requests are done."""
        if mode is not PauseMode.WAIT or not self._core.scheduler.running:
            return switch()
        pending = self._core.pause_scheduler("wait", False)

        def after() -> dict[str, Any]:
            try:
                return switch()
            finally:
                self._core.resume_scheduler()
                # The loop was idle when it got here, and would go on waiting for
                # its input queue while requests wait for it.
                self._gate.rouse()

        return _then(pending, after)

    def treat(self, mode: PauseMode, *, flush_cache: bool = False) -> dict[str, int]:
        """Do to the requests what a commit in `mode` does; returns the counts."""
        counts: dict[str, int] = {}
        if mode is PauseMode.RETRACT:
            counts["num_retracted"] = self._core.scheduler.inflight_retract()
        elif mode is PauseMode.ABORT:
            counts["num_aborted"] = self._abort_all()
        if flush_cache:
            self.flush()
        return counts

    def _abort_all(self) -> int:
        """Finish every request as aborted and tell whoever waits for it."""
        aborted = self._core.scheduler.finish_requests(
            None, upstream.RequestStatus.FINISHED_ABORTED
        )
        if self._gate.in_process:
            self._gate.farewells += [request.request_id for request in aborted]
        else:
            self._core._send_abort_outputs(aborted)
        return len(aborted)

    def _reply(self, started: float) -> dict[str, Any]:
        running, waiting = self._core.scheduler.get_request_counts()
        return {
            "paused": self.is_paused,
            "mode": self._mode and self._mode.value,
            "num_running": running,
            "num_waiting": waiting,
            "weight_version": self._gate.version.label,
            "lease_s": self._lease.left_s,
            "owner": self._lease.owner,
            "seconds": round(time.perf_counter() - started, 6),
        }


def _is_looser(mode: PauseMode, than: PauseMode) -> bool:
    if mode not in STRICTNESS or than not in STRICTNESS:
        return False
    return STRICTNESS.index(mode) < STRICTNESS.index(than)


def _then(pending: Future[Any] | None, call: Callable[[], dict[str, Any]]) -> Any:
    """`call` now, or when `pending` is done, on the thread that finishes it."""
    if pending is None:
        return call()
    result: Future[dict[str, Any]] = Future()

    def done(finished: Future[Any]) -> None:
        try:
            finished.result()
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    pending.add_done_callback(done)
    return result
