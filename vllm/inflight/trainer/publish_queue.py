"""The publish queue: one publish under way, and at most one waiting.

So there are never more than two snapshots. The policy `on_busy` decides about a third
publish: it waits for a place, it is skipped, or it replaces the waiting one.

A queue that was not closed is closed when the interpreter ends. The publishes in it
then have a few seconds, and are given up after that.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from vllm.inflight.background import Background
from vllm.inflight.errors import Cancelled
from vllm.inflight.trainer.coordinator import GIVE_UP_S, SLACK_S
from vllm.inflight.trainer.deltas.delta import Delta
from vllm.inflight.trainer.outcome import Outcome, PublishFuture
from vllm.inflight.trainer.retry import LOOK_S, RetryBudget, WaitLog
from vllm.inflight.trainer.snapshot import Snapshot
from vllm.inflight.trainer.sources.stream import Pair
from vllm.inflight.update import Manifest

ON_BUSY = ("wait", "skip", "latest")

EXIT_S = 5.0
"""The time that publishes have left when the interpreter ends, in seconds."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class QueuedPublish:
    """One publish, from its snapshot to its outcome."""

    version: str | None
    mode: str | None
    step: int | None
    subset: tuple[str, ...]
    """Patterns of the tensor names in the snapshot; empty for all tensors."""
    base_version: str | None
    called_at: float
    """The time of the call of `publish`, on the monotonic clock, in seconds."""
    snapshot: Snapshot = field(init=False)
    device: torch.device | None = None
    """Of the first tensor of the source."""
    delta: Delta | None = None
    """What the snapshot holds, if that is a delta and not all tensors."""
    bases: dict[str, str] = field(default_factory=dict)
    """Engine name → the digest that the snapshot's delta starts from there, if the
    engines serve older versions than the base of `delta`."""
    manifest: Manifest = field(default_factory=Manifest)
    """Of all tensors; empty until it is known, and for a delta of `delta`. With `bases`
    it is that of the delta from an older version."""
    is_announced: bool = False
    """Whether `manifest` was known before the snapshot was taken."""
    is_named: bool = False
    """Whether the tensors of the snapshot have the names of the model."""
    snapshot_s: float = 0.0
    mapped: dict[str, str] = field(default_factory=dict)
    """From names of the source to those of the model, as `auto` has found them."""
    future: PublishFuture = field(default_factory=PublishFuture)
    retry_budget: RetryBudget = field(default_factory=lambda: RetryBudget(0.0))
    """Made when its turn comes; whoever gives the job up, gives this up."""

    def noting_device(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """The same tensors, with the device of the first one noted."""
        for name, tensor in pairs:
            if self.device is None:
                self.device = tensor.device
            yield name, tensor

    def skipped(self) -> Outcome:
        """The outcome of a publish that is skipped."""
        return Outcome(version=self.version, step=self.step, skipped=True)


class PublishQueue:
    """Runs jobs one after another, in a thread that ends when there are none.

    Args:
        on_busy: the policy for a third publish; one of `ON_BUSY`.
        timeout_s: the retry budget of each job, in seconds.
        run_publish: runs one job.

    """

    def __init__(
        self,
        on_busy: str,
        timeout_s: float,
        run_publish: Callable[[QueuedPublish], Outcome],
    ) -> None:
        self._on_busy = on_busy
        self._timeout_s = timeout_s
        self._run_publish = run_publish
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._current: QueuedPublish | None = None
        self._waiting: QueuedPublish | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._given_up: Cancelled | None = None
        self._gone_by = float("inf")
        """The time by which jobs that were given up must end, on the monotonic
        clock."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        with self._changed:
            return self._current is None and self._waiting is None

    def make_room(self, *, may_wait: bool = True) -> bool:
        """Make a place for one more job; False if the job is to be skipped.

        One thread at a time may call this, before it takes the job's snapshot.

        Raises:
            RuntimeError: the queue is closed, or there is no place and `may_wait` is
                False.

        """
        replaced = None
        with self._changed:
            self._require_open()  # checked before a waiting job is dropped
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
            replaced.snapshot.remove()
            if replaced.future.set_running_or_notify_cancel():
                replaced.future.set_result(replaced.skipped())
        return True

    def put(self, job: QueuedPublish) -> None:
        """Run `job` after the one under way; raises as `make_room` does."""
        with self._changed:
            self._require_open()  # it may have been closed while the snapshot was taken
            if self._thread is None:
                thread = Background(self._work, name="inflight-publish")
                thread.start()  # if this fails, the job is not queued
                self._thread = thread
                _register_at_exit(self)
            self._waiting = job
            self._changed.notify_all()

    def result(self, job: QueuedPublish) -> Outcome:
        """Wait for the result of `job`; logs what it waits for if that takes long.

        An interrupt gives the job up.
        """
        log = WaitLog()
        try:
            while True:
                try:
                    return job.future.result(LOOK_S)
                except TimeoutError:
                    if job.future.done():
                        raise  # its own
                    _tell(log, "publish of", job)
        except KeyboardInterrupt:
            self.give_one_up(job, "the call of publish was interrupted")
            raise

    def give_one_up(self, job: QueuedPublish, why: str) -> None:
        """Give one job up, unless it is committed; the others go on."""
        if not job.future.cancel():
            job.retry_budget.give_up(Cancelled(why))

    def give_way(self, seconds: float) -> bool:
        """Wait; True as soon as a newer job replaces the one under way.

        Returns at once if the jobs are given up.
        """

        def is_replaced() -> bool:
            return self._on_busy == "latest" and self._waiting is not None

        with self._changed:
            self._changed.wait_for(
                lambda: is_replaced() or self._given_up is not None, seconds
            )
            return is_replaced()

    def close(self) -> None:
        """Take no more jobs, and wait for those in the queue.

        The log shows what is waited for. An interrupt gives the jobs up.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        log = WaitLog()
        try:
            while self._given_up is None and not self._is_over(LOOK_S):
                _tell(log, "closing waits for", self._current)
        except BaseException as error:
            self.give_up(f"close() was interrupted by {type(error).__name__}")
            raise

    def give_up(self, why: str, *, wait: bool = True) -> None:
        """Take no more jobs, and give up jobs that are not committed.

        Args:
            why: the reason, as the beginning of a sentence.
            wait: whether to wait until the engines have undone the updates, for at
                most a few seconds.

        """
        with self._changed:
            self._closed = True
            message = f"{why}; it was given up before its commit"
            if self._given_up is None:
                self._given_up = Cancelled(message)
                self._gone_by = time.monotonic() + GIVE_UP_S + 2 * SLACK_S
            waiting, self._waiting = self._waiting, None
            if self._current is not None:
                self._current.retry_budget.give_up(self._given_up)
            self._changed.notify_all()
        if waiting is not None:
            waiting.snapshot.remove()
            if waiting.future.set_running_or_notify_cancel():
                waiting.future.set_exception(Cancelled(message))
        if wait:
            self._is_over(self._gone_by - time.monotonic())

    def _is_over(self, seconds: float) -> bool:
        """Wait; whether all jobs and their futures are done within `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_idle, max(0.0, seconds)):
                return False
            thread = self._thread
        # The thread sets the last job's future after the job. Without this wait, a
        # failure could go unseen in a process that ends now.
        if thread not in (None, threading.current_thread()):
            thread.join(max(0.0, until - time.monotonic()))
            return not thread.is_alive()
        return True

    def close_at_exit(self, until: float) -> None:
        """Close the queue when the interpreter ends; `until` is on the monotonic clock.

        Jobs that are not done by then are given up. Jobs that were given up before are
        not awaited any longer than was set then.
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
                    outcome = self._run_publish(job)
                except BaseException as error:
                    failure = error
            try:
                job.snapshot.remove()
            except Exception as error:  # set on the job's future below
                failure = failure or error
                if not is_wanted:
                    logger.warning("a snapshot was not removed: %s", error)
            with self._changed:
                self._current = None
                self._changed.notify_all()
            # Done last, because a waiting caller may publish again at once.
            if not is_wanted:
                continue
            if failure is not None:
                job.future.set_exception(failure)
            elif outcome is not None:
                job.future.set_result(outcome)

    def _next(self) -> QueuedPublish | None:
        """Take the waiting job; None if there is none, and the thread ends."""
        with self._changed:
            self._current, self._waiting = self._waiting, None
            self._changed.notify_all()
            if self._current is None:
                self._thread = None
            else:
                self._current.retry_budget = RetryBudget(self._timeout_s)
            return self._current


def _tell(log: WaitLog, beginning: str, job: QueuedPublish | None) -> None:
    """Log what a job waits for."""
    if job is not None and (waits_for := job.retry_budget.waits_for):
        log(f"{beginning} {job.version!r}: {waits_for}")


_unclosed: weakref.WeakSet[PublishQueue] = weakref.WeakSet()
"""Queues that have had a thread. The process owns this, for its exit hook; while it is
empty, no hook is registered."""


def _register_at_exit(queue: PublishQueue) -> None:
    # Hooks run in reverse order of their registration. The hooks that remove snapshots
    # and end threads are registered by now, so they run after this one.
    if not _unclosed:
        atexit.unregister(_close_all_at_exit)
        atexit.register(_close_all_at_exit)
    _unclosed.add(queue)


def _close_all_at_exit() -> None:
    until = time.monotonic() + EXIT_S
    for queue in list(_unclosed):
        queue.close_at_exit(until)
