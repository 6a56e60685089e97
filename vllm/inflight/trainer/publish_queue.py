"""The queue of a publisher: one publish under way, and at most one that waits.

So there are never more than two snapshots. What happens to a third publish is
the policy `on_busy`: it waits for a place, it is skipped, or it takes the place
of the one that waits.

A queue that nobody has closed is closed when the interpreter ends. What is under way
then has a few seconds to be served; after that it is given up.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm.inflight.background import Background
from vllm.inflight.errors import Cancelled
from vllm.inflight.trainer.coordinator import GIVE_UP_S, SLACK_S
from vllm.inflight.trainer.outcome import Outcome, PublishFuture
from vllm.inflight.trainer.retry import RetryBudget
from vllm.inflight.trainer.snapshot import Snapshot

ON_BUSY = ("wait", "skip", "latest")

EXIT_S = 5.0
"""What publishes that are under way have left when the interpreter ends."""

LOOK_S, NOTE_S = 1.0, 30.0
"""Of a wait: how often it is looked at, and how often the same is logged of it."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class QueuedPublish:
    """One publish, from its snapshot to its outcome."""

    version: str | None
    mode: str | None
    step: int | None
    subset: tuple[str, ...]
    """Patterns of the names that are in the parcel; all if there are none."""
    base_version: str | None
    asked: float
    """When publish was called, on the monotonic clock, in seconds."""
    parcel: Snapshot = field(init=False)
    snapshot_s: float = 0.0
    mapped: dict[str, str] = field(default_factory=dict)
    """From names of the source to those of the model, as `auto` has found them."""
    future: PublishFuture = field(default_factory=PublishFuture)
    patience: RetryBudget = field(default_factory=lambda: RetryBudget(0.0))
    """Made when its turn comes; whoever gives the job up, gives this up."""

    def skipped(self) -> Outcome:
        """The outcome of giving way."""
        return Outcome(version=self.version, step=self.step, skipped=True)


class PublishQueue:
    """Runs jobs one after another in a thread that lives while there are any."""

    def __init__(
        self,
        on_busy: str,
        timeout_s: float,
        deliver: Callable[[QueuedPublish], Outcome],
    ) -> None:
        self._on_busy = on_busy
        self._timeout_s = timeout_s
        self._deliver = deliver
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._current: QueuedPublish | None = None
        self._waiting: QueuedPublish | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._given_up: Cancelled | None = None
        self._gone_by = float("inf")
        """When what was given up has to be over, on the monotonic clock."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        with self._changed:
            return self._current is None and self._waiting is None

    def make_room(self, *, may_wait: bool = True) -> bool:
        """Make a place for one more job; False if that job is to be skipped.

        Called before its snapshot is taken, by one thread at a time.

        Raises:
            RuntimeError: this was closed; or there is no place, and it may not wait.

        """
        replaced = None
        with self._changed:
            self._require_open()  # first: nothing would come in place of who waits
            if self._on_busy == "skip" and not self.is_idle:
                return False
            if self._on_busy == "latest":
                replaced, self._waiting = self._waiting, None
            if self._waiting is not None and not may_wait:
                raise RuntimeError(
                    "one publish is under way and one waits, so this call would block "
                    "the engine's event loop until there is a place; await one of "
                    "them first, or use await publisher.apublish(...) "
                    "or await asyncio.to_thread(publisher.publish, ...)"
                )
            self._changed.wait_for(lambda: self._waiting is None)
            self._require_open()
        if replaced is not None:
            replaced.parcel.remove()
            if replaced.future.set_running_or_notify_cancel():
                replaced.future.set_result(replaced.skipped())
        return True

    def put(self, job: QueuedPublish) -> None:
        """Have `job` delivered after the one under way; raises as `make_room` does."""
        with self._changed:
            self._require_open()  # during the snapshot it may have been closed
            if self._thread is None:
                thread = Background(self._work, name="inflight-publish")
                thread.start()  # it may fail, and then nothing waits
                self._thread = thread
                _leave_at_exit(self)
            self._waiting = job
            self._changed.notify_all()

    def result(self, job: QueuedPublish) -> Outcome:
        """What becomes of `job`; tells what it waits for, if that takes long.

        Who is interrupted here wants it no longer: it is given up.
        """
        tell = _Telling("publish of")
        try:
            while True:
                try:
                    return job.future.result(LOOK_S)
                except TimeoutError:
                    if job.future.done():
                        raise  # its own
                    tell(job)
        except KeyboardInterrupt:
            self.give_one_up(job, "the call of publish was interrupted")
            raise

    def give_one_up(self, job: QueuedPublish, why: str) -> None:
        """Give one job up, unless it is committed; the others go on."""
        if not job.future.cancel():
            job.patience.give_up(Cancelled(why))

    def give_way(self, seconds: float) -> bool:
        """Wait; True as soon as a newer job is to replace the one under way.

        Returns at once when the jobs are given up.
        """

        def is_replaced() -> bool:
            return self._on_busy == "latest" and self._waiting is not None

        with self._changed:
            self._changed.wait_for(
                lambda: is_replaced() or self._given_up is not None, seconds
            )
            return is_replaced()

    def close(self) -> None:
        """Take no more jobs, and wait for those that were taken.

        It tells what it waits for. Who is interrupted here gives them up.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        tell = _Telling("closing waits for")
        try:
            while self._given_up is None and not self._is_over(LOOK_S):
                tell(self._current)
        except BaseException as error:
            self.give_up(f"close() was interrupted by {type(error).__name__}")
            raise

    def give_up(self, why: str, *, wait: bool = True) -> None:
        """Take no more jobs, and give those up that are not committed.

        Args:
            why: the beginning of a sentence about it.
            wait: for the engines to have taken them back, at most some seconds.

        """
        with self._changed:
            self._closed = True
            message = f"{why}; it was given up before its commit"
            if self._given_up is None:
                self._given_up = Cancelled(message)
                self._gone_by = time.monotonic() + GIVE_UP_S + 2 * SLACK_S
            waiting, self._waiting = self._waiting, None
            if self._current is not None:
                self._current.patience.give_up(self._given_up)
            self._changed.notify_all()
        if waiting is not None:
            waiting.parcel.remove()
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(Cancelled(message))
        if wait:
            self._is_over(self._gone_by - time.monotonic())

    def _is_over(self, seconds: float) -> bool:
        """Whether all jobs are over within so many seconds, and known to be."""
        until = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_idle, max(0.0, seconds)):
                return False
            thread = self._thread
        # The last job is over and its future may not have been told: without that, its
        # failure would go unheard in a process that ends now.
        if thread not in (None, threading.current_thread()):
            thread.join(max(0.0, until - time.monotonic()))
            return not thread.is_alive()
        return True

    def leave(self, until: float) -> None:
        """Close it at exit; on the monotonic clock, what is not over then is given up.

        What was given up before is waited for only as long as was said then.
        """
        if self._thread is None or not self._thread.is_alive():
            return  # a fork of this process has no thread
        with self._changed:
            self._closed = True
        if self._given_up is None and self._is_over(until - time.monotonic()):
            return
        self.give_up(
            f"the interpreter ended, and it was not served within {EXIT_S:g} s; call "
            "close() of the publisher, or use it in a with block, to have it waited for"
        )

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the publisher is closed")

    def _work(self) -> None:
        while (job := self._next()) is not None:
            outcome, failure = None, None
            is_wanted = job.future.set_running_or_notify_cancel()
            if is_wanted:
                try:
                    outcome = self._deliver(job)
                except BaseException as error:
                    failure = error
            try:
                job.parcel.remove()
            except Exception as error:  # whoever waits for the job is told below
                failure = failure or error
                if not is_wanted:
                    logger.warning("a snapshot was not removed: %s", error)
            with self._changed:
                self._current = None
                self._changed.notify_all()
            # Last, because whoever waits for it may publish again at once.
            if not is_wanted:
                continue
            if failure is not None:
                job.future.set_exception(failure)
            elif outcome is not None:
                job.future.set_result(outcome)

    def _next(self) -> QueuedPublish | None:
        """The job that waits is the one under way now; without one, the thread ends."""
        with self._changed:
            self._current, self._waiting = self._waiting, None
            self._changed.notify_all()
            if self._current is None:
                self._thread = None
            else:
                self._current.patience = RetryBudget(self._timeout_s)
            return self._current


class _Telling:
    """Logs what a job waits for, when that is new, or has not been said for long."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning
        self._told, self._told_at = "", float("-inf")

    def __call__(self, job: QueuedPublish | None) -> None:
        waits_for = "" if job is None else job.patience.waits_for
        now = time.monotonic()
        is_new = waits_for != self._told or now - self._told_at > NOTE_S
        if job is not None and waits_for and is_new:
            self._told, self._told_at = waits_for, now
            logger.warning("%s %r: %s", self._beginning, job.version, waits_for)


_unclosed: weakref.WeakSet[PublishQueue] = weakref.WeakSet()
"""Those that have had a thread; empty as long as nothing runs at exit."""


def _leave_at_exit(queue: PublishQueue) -> None:
    # Not when this module is imported. Hooks run in the reverse order of their
    # registration, and those that remove parcels and end threads are registered by now.
    if not _unclosed:
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)
    _unclosed.add(queue)


def _leave_all() -> None:
    until = time.monotonic() + EXIT_S
    for queue in list(_unclosed):
        queue.leave(until)
