"""The update monitor: a thread that reads the status board during an update.

It moves the update to its next phase when all ranks have got there, ends it at its
deadline, and answers waiting calls. It runs only while there is something to wait for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.background import Background
from vllm.inflight.engine.transaction import SPENT, Update
from vllm.inflight.engine.update.ledger import Ledger
from vllm.inflight.engine.update.ranks import Ranks, agree, verdict, with_written
from vllm.inflight.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    EngineFault,
    InflightError,
    WeightsMismatch,
)
from vllm.inflight.messages import State, Status
from vllm.inflight.update import Phase

POLL_S = 0.002
LEAST_POLL_S = 0.0001
POLLED_SHARE = 0.125
"""Of the time that a call has waited, the part after which the board is read again. A
framework may make a call for each tensor, which takes a rank a millisecond."""
MORE_S = 0.5
"""After one rank rejects an update, longest wait for the errors of other ranks."""

logger = upstream.init_logger(__name__)

Ready = Callable[[], dict[str, Any] | None]
"""Returns the result of a wait, or None before it is there; raises on failure."""


class UpdateMonitor:
    """Monitors the active update of one engine."""

    def __init__(
        self,
        ranks: Ranks,
        ledger: Ledger,
        ended: Callable[[Update, InflightError], None],
    ) -> None:
        self._ranks = ranks
        self._ended = ended
        self._ledger = ledger
        self._lock = threading.Lock()
        self._waiting: list[tuple[Future[dict[str, Any]], Ready]] = []
        self._asked = 0.0
        """When the last wait has begun."""
        self._update: Update | None = None
        self._seen: list[Any] = []
        """The progress of the ranks when the update last moved."""
        self._refused: tuple[int, float] | None = None
        """The update that a rank rejected last, and when the monitor saw it."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, update: Update) -> None:
        """Monitor `update` until it ends."""
        with self._lock:
            self._update = update
            self._ensure_thread()

    def when_received(self, update: Update) -> Future[dict[str, Any]]:
        """Return a Future, done when all ranks have executed the commands so far."""
        num_commands = update.num_commands

        def ready() -> dict[str, Any] | None:
            statuses = self._alive(update)
            done = min(status.orders for status in statuses) >= num_commands
            if not done and update.phase is Phase.STAGING:
                return None
            return update.state() | {
                "bytes": sum(status.bytes for status in statuses),
                "parameters": _added(status.parameters or {} for status in statuses),
            }

        return self._wait(ready)

    def when_staged(self, update: Update) -> Future[dict[str, Any]]:
        """Return a Future, done when every rank has prepared its commit."""

        def ready() -> dict[str, Any] | None:
            self._alive(update)
            return None if update.phase is Phase.STAGING else update.vote()

        return self._wait(ready)

    def when_carried_out(
        self, serial: int, deadline_s: float
    ) -> Future[dict[str, Any]]:
        """Return a Future, done when all ranks have executed the command `serial`."""
        deadline = time.monotonic() + deadline_s

        def ready() -> dict[str, Any] | None:
            statuses = self._ranks.statuses()
            state = self._verdict(statuses, serial)
            if isinstance(state, InflightError):
                raise state
            if state is not None and all(status.orders for status in statuses):
                return {}
            if all(status.serial > serial for status in statuses):
                raise Cancelled("the transport was shut down before it was connected")
            if time.monotonic() > deadline:
                self._ranks.cancel(serial)
                raise DeadlineExceeded(f"not done within {deadline_s:g} s")
            return None

        return self._wait(ready)

    def close(self) -> None:
        """End the thread; waiting calls fail."""
        self._close_soon()
        if (thread := self._thread) is not None:
            thread.join(timeout=1.0)

    # ------------------------------------------------------------- the thread
    def _close_soon(self) -> None:
        self._closed = True

    def _wait(self, ready: Ready) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            self._waiting.append((future, ready))
            self._asked = time.monotonic()
            self._ensure_thread()
        self._ranks.wake()
        return future

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = Background(
                self._work, name="inflight-watch", end=self._close_soon
            )
            self._thread.start()

    def _work(self) -> None:
        while not self._closed:
            if (update := self._update) is not None:
                try:
                    self._look_after(update)
                except Exception as error:
                    # Otherwise calls that wait for this thread would wait for ever.
                    logger.exception("update %r", update.update_id)
                    fault = EngineFault(f"{type(error).__name__}: {error}")
                    try:
                        self.end(update, fault)
                    except Exception:
                        # The ledger has ended the update, and `_answer` tells the
                        # waiting calls.
                        logger.exception("update %r was not ended", update.update_id)
                with self._lock:  # the next one may have begun by now
                    if self._update is update and not update.is_active:
                        self._update = None
            self._answer()
            with self._lock:
                if self._update is None and not self._waiting:
                    self._thread = None
                    return
            self._ranks.rest(self._poll_s())
        with self._lock:  # a later call finds no thread and starts one
            waiting, self._waiting = self._waiting, []
            self._thread = None
        for future, _ in waiting:
            future.set_exception(EngineFault("the engine has been shut down"))

    def _poll_s(self) -> float:
        """Seconds until the board is read again, unless a rank posts in this process.

        Each time takes the interpreter from the thread that decodes. So it is often
        only where ranks have processes of their own, and cannot end the rest.
        """
        if self._ranks.are_here or not self._waiting:
            return POLL_S
        waited = time.monotonic() - self._asked
        return min(POLL_S, max(LEAST_POLL_S, POLLED_SHARE * waited))

    def _look_after(self, update: Update) -> None:
        """Advance or end `update`, by the statuses of its ranks and the clock."""
        if not update.is_active:
            return
        if time.monotonic() > update.deadline:
            error: InflightError = DeadlineExceeded(
                f"update {update.update_id!r} was not committed within its deadline "
                f"and is aborted; it was {update.phase.value}"
                + _held(self._ranks.statuses(), update.serial)
            )
            self.end(update, error)
            return
        if update.phase is not Phase.STAGING:
            return
        statuses = self._ranks.statuses()
        self._note_progress(update, statuses)
        state = self._verdict(statuses, update.serial)
        if isinstance(state, WeightsMismatch) and self._may_add(statuses, update):
            return
        if isinstance(state, InflightError):
            self.end(update, state)
        elif state == "staged":
            digest = agree(statuses)
            if isinstance(digest, InflightError):
                self.end(update, digest)
            else:
                update.digest = digest
                update.sent = with_written(statuses[0].sent, statuses)
                update.num_bytes = sum(status.bytes for status in statuses)
                update.num_replayed = max(status.replayed or 0 for status in statuses)
                unproved = max(status.unproved or 0 for status in statuses)
                self._ranks.num_unproved = unproved
                for part in SPENT:
                    spent = [status.spent_s(part) for status in statuses]
                    if known := [seconds for seconds in spent if seconds is not None]:
                        update.spent[part] = max(known)
                # Every rank receives every tensor and takes the same samples.
                update.drift = statuses[0].drift
                self._ledger.move(update, Phase.STAGED)

    def _may_add(self, statuses: list[Status], update: Update) -> bool:
        """Whether another rank may still add errors to a rejection.

        The monitor waits for ranks that still execute commands, at most `MORE_S`.
        """
        if self._refused is None or self._refused[0] != update.serial:
            self._refused = update.serial, time.monotonic()
        if time.monotonic() - self._refused[1] > MORE_S:
            return False
        return any(
            status.serial != update.serial
            or (
                status.state not in ("failed", "staged")
                and status.orders < update.num_commands
            )
            for status in statuses
        )

    def _verdict(
        self, statuses: list[Status], serial: int
    ) -> InflightError | State | None:
        state = verdict(statuses, serial)
        if isinstance(state, Cancelled) and not self._ranks.has_given_up(serial):
            # One rank has died, and the executor ends the other ranks.
            return EngineFault("a rank was shut down meanwhile; the engine ends")
        return state

    def _note_progress(self, update: Update, statuses: list[Status]) -> None:
        seen: list[Any] = [(each.serial, each.orders, each.bytes) for each in statuses]
        seen.append(update.num_commands)
        if seen != self._seen:
            self._seen, update.moved = seen, time.monotonic()

    def end(self, update: Update, error: InflightError) -> None:
        """Abort `update` with `error`, which its waiting calls get."""
        failed: list[Exception] = []

        def cancel() -> None:
            try:
                self._ranks.cancel(update.serial)
            except Exception as failure:  # the update ends all the same
                failed.append(failure)

        if self._ledger.move(update, Phase.ABORTED, error, cancel):
            self._ended(update, error)
        if failed:
            raise failed[0]

    def _alive(self, update: Update) -> list[Status]:
        """The statuses of the ranks on `update`; raises if it was aborted."""
        if update.phase is Phase.ABORTED:
            update.is_told = True
            raise update.error or Conflict(
                f"update {update.update_id!r} was aborted",
                phase=update.phase.value,
                update_id=update.update_id,
            )
        return [
            status if status.serial == update.serial else Status()
            for status in self._ranks.statuses()
        ]

    def give_up(self, future: Future[dict[str, Any]], error: Exception) -> None:
        """Fail `future` with `error`, unless it has its answer."""
        with self._lock:
            entry = next((e for e in self._waiting if e[0] is future), None)
            if entry is None:
                return
            self._waiting.remove(entry)
        with suppress(InvalidStateError):
            future.set_exception(error)

    def _answer(self) -> None:
        with self._lock:
            waiting = list(self._waiting)
        for entry in waiting:
            future, ready = entry
            result: dict[str, Any] | Exception | None
            try:
                result = ready()
            except Exception as error:
                result = error
            with self._lock:
                if result is None or entry not in self._waiting:
                    continue  # not ready, or given up meanwhile
                self._waiting.remove(entry)
            with suppress(InvalidStateError):  # the caller has cancelled it
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)


def _held(statuses: Sequence[Status], serial: int) -> str:
    """The threads for which ranks wait."""
    return "".join(
        f"; rank {rank} waits for {status.held_by}"
        for rank, status in enumerate(statuses)
        if status.serial == serial and status.held_by is not None
    )


def _added(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for part in parts:
        sums.update(part)
    return dict(sums)
