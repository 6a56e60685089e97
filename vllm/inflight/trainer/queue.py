"""The queue of a publisher: one publish under way, and at most one that waits.

So there are never more than two snapshots. What happens to a third publish is
the policy `on_busy`: it waits for a place, it is skipped, or it takes the place
of the one that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from vllm.inflight.trainer.outcome import Outcome
from vllm.inflight.trainer.parcel import Parcel

ON_BUSY = ("wait", "skip", "latest")


@dataclass(slots=True, eq=False)
class Job:
    """One publish, from its snapshot to its outcome."""

    parcel: Parcel
    version: str | None
    mode: str | None
    step: int | None
    asked: float
    """When publish was called, on the monotonic clock, in seconds."""
    snapshot_s: float
    subset: tuple[str, ...] = ()
    """Patterns of the names that are in the parcel; all if there are none."""
    base_version: str | None = None
    future: Future[Outcome] = field(default_factory=Future)

    def skipped(self) -> Outcome:
        """The outcome of giving way."""
        return Outcome(version=self.version, step=self.step, skipped=True)


class Queue:
    """Runs jobs one after another in a thread that lives while there are any."""

    def __init__(self, on_busy: str, deliver: Callable[[Job], Outcome]) -> None:
        self._on_busy = on_busy
        self._deliver = deliver
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._current: Job | None = None
        self._waiting: Job | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        with self._changed:
            return self._current is None and self._waiting is None

    def make_room(self) -> bool:
        """Make a place for one more job; False if that job is to be skipped.

        Called before its snapshot is taken, by one thread at a time.

        Raises:
            RuntimeError: this was closed.

        """
        replaced = None
        with self._changed:
            self._require_open()  # first: nothing would come in place of who waits
            if self._on_busy == "skip" and not self.is_idle:
                return False
            if self._on_busy == "latest":
                replaced, self._waiting = self._waiting, None
            self._changed.wait_for(lambda: self._waiting is None)
            self._require_open()
        if replaced is not None:
            replaced.parcel.remove()
            if replaced.future.set_running_or_notify_cancel():
                replaced.future.set_result(replaced.skipped())
        return True

    def put(self, job: Job) -> None:
        """Have `job` delivered after the one under way; raises as `make_room` does."""
        with self._changed:
            self._require_open()  # during the snapshot it may have been closed
            self._waiting = job
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="inflight-publish", daemon=True
                )
                self._thread.start()

    def give_way(self, seconds: float) -> bool:
        """Wait; True as soon as a newer job is to replace the one under way."""
        if self._on_busy != "latest":
            time.sleep(seconds)
            return False
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is not None, seconds)

    def close(self) -> None:
        """Take no more jobs, and wait for those that were taken."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self.is_idle)
            thread = self._thread
        # The last job is over and its future may not have been told: without that, its
        # failure would go unheard in a process that ends now.
        if thread not in (None, threading.current_thread()):
            thread.join()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the publisher is closed")

    def _work(self) -> None:
        while (job := self._next()) is not None:
            outcome, failure = None, None
            if job.future.set_running_or_notify_cancel():
                try:
                    outcome = self._deliver(job)
                except BaseException as error:
                    failure = error
            try:
                job.parcel.remove()
            except Exception as error:  # whoever waits for the job is told below
                failure = failure or error
            with self._changed:
                self._current = None
                self._changed.notify_all()
            # Last, because whoever waits for it may publish again at once.
            if failure is not None:
                job.future.set_exception(failure)
            elif outcome is not None:
                job.future.set_result(outcome)

    def _next(self) -> Job | None:
        """The job that waits is the one under way now; without one, the thread ends."""
        with self._changed:
            self._current, self._waiting = self._waiting, None
            self._changed.notify_all()
            if self._current is None:
                self._thread = None
            return self._current
