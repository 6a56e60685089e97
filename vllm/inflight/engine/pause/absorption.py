"""Absorbed pauses: decoding goes on until something needs the pause.

Many trainers pause around an update, because vLLM's own update needs it. An update
here does not. With `--inflight-pauses absorb`, a pause `in_place` or `retract` is
answered at once and decoding goes on. The client is told that the engine is paused. A
commit treats the requests as the pause would have done.

The pause takes force by itself before anything happens that needs it, see `Need`. It
then stops decoding, like a pause that was obeyed from the start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Any

from vllm.inflight.engine.context import EngineContext
from vllm.inflight.update import PauseMode

PATIENCE_S = 10.0
"""A pause takes force when no update has begun or ended for so many seconds."""

QUEUED_S = 0.2
"""Then so long again: a call may have waited for the end of a long step."""

ABSORBABLE = (PauseMode.IN_PLACE, PauseMode.RETRACT)
"""Modes that lose no token. What they do to KV, a commit can do as well."""

LATER = "the pause is absorbed; the next commit drops the caches"


class Need(StrEnum):
    """Why an absorbed pause takes force."""

    WORKER_CALL = "worker_call"
    """A call of the workers that may read or write weights, and is not adopted."""
    SINGLE_TENSORS = "single_tensors"
    """An adopted call of a framework that makes one for each tensor."""
    LOAD = "load"
    """`load_weights` of the live model, called in the engine's own process."""
    WRITE = "write"
    """An out-of-band write that only its traces have shown."""
    SAVE = "save"
    """The weights are saved to files."""
    SLEEP = "sleep"
    """A sleep."""
    RELEASE = "release"
    """A release of memory."""
    CACHE_RESET = "cache_reset"
    """A cache reset that has to find no running request."""
    PAUSE = "pause"
    """A pause `abort`, which is never absorbed."""
    NO_UPDATE = "no_update"
    """No update has come for `PATIENCE_S`."""


class Absorption:
    """The absorbed pause of one engine core, while there is one.

    It changes only between two steps.

    Args:
        controller: of the engine core.
        stop: stops decoding, treats the requests as the mode says, and drops the
            caches if its second argument says so. If it returns a Future, steps are in
            flight until the Future is done.
        is_on: whether pauses are absorbed.

    """

    def __init__(
        self,
        controller: EngineContext,
        stop: Callable[[PauseMode, bool], Any],
        *,
        is_on: bool,
    ) -> None:
        self._controller = controller
        self._stop = stop
        self._is_on = is_on
        self.mode: PauseMode | None = None
        """The mode of the absorbed pause; None if no pause is absorbed."""
        self.is_flush = False
        """Whether the pause also asked to drop the caches."""
        self.owes_flush = False
        """Whether a pause that has taken force has not dropped the caches so far."""
        self._forced_mode: PauseMode | None = None
        """The mode of the last pause that took force."""
        self._forced: Future[Any] | None = None
        """Done when the last pause that took force has stopped decoding."""
        self._timer: threading.Timer | None = None
        self._num_seen = 0
        """How many updates had ended when the timer began."""

    @property
    def is_to_flush(self) -> bool:
        """Whether the next commit has to drop the caches."""
        return self.is_flush or self.owes_flush

    @property
    def is_settling(self) -> bool:
        """Whether a pause has taken force, and steps are still in flight."""
        return self._forced is not None and not self._forced.done()

    @property
    def detail(self) -> str | None:
        """What an operator has to know; None if no pause is absorbed."""
        if self.mode is None:
            return None
        return f"a pause in mode {self.mode.value} is absorbed, and decoding goes on"

    def takes(self, mode: PauseMode) -> bool:
        """Whether a pause in `mode` is absorbed now.

        An engine that stands still already has nothing to absorb. An engine that cannot
        be updated in flight needs every pause.
        """
        if not self._is_on or mode not in ABSORBABLE:
            return False
        if self.mode is not None:
            return True
        controller = self._controller
        can_update = controller.ranks.reason is None and controller.sleep.may_decode
        return can_update and not controller.pauses.is_paused

    def begin(self, mode: PauseMode, *, flush_cache: bool) -> None:
        """Absorb a pause, make an absorbed one stricter, or renew it."""
        if self.mode is None:
            self._controller.counts.num_absorbed += 1
        self.mode, self.is_flush = mode, self.is_flush or flush_cache
        self._wait()

    def end(self) -> None:
        """End the absorbed pause, if there is one; decoding goes on."""
        self.mode, self.is_flush = None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def enforce(self, need: Need) -> Future[Any] | None:
        """Let the absorbed pause take force.

        Returns:
            a Future that is done when no step is in flight; None if none is.

        """
        if (mode := self.mode) is None:
            return self._forced if self.is_settling else None
        is_flush = self.is_flush
        self.end()
        self.owes_flush, self._forced_mode = is_flush, mode
        try:
            stopped = self._stop(mode, is_flush)
        except BaseException:
            self.mode, self.is_flush, self.owes_flush = mode, is_flush, False
            raise
        self._controller.counts.enforced[need.value] += 1
        self._controller.events.enforced(mode, need.value)
        self._forced = stopped if isinstance(stopped, Future) else None
        return self._forced

    def before(self, need: Need, call: Callable[[], Any]) -> Any:
        """Make `call` when no pause is absorbed any more and no step is in flight.

        Returns:
            what `call` returns, or a Future of that.

        Raises:
            PauseConflict: decoding went on before the pause had stopped it. The Future
                fails with it, and `call` is not made.

        """
        if self.mode is None and not self.is_settling:
            return call()
        if self._controller.in_process:
            self._controller.step_queue.run(lambda: self.enforce(need))
            return call()
        stopped = self.enforce(need)
        if stopped is None:
            return call()
        answer: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

        def act(done: Future[Any]) -> None:
            try:
                done.result()
                made = call()
            except Exception as error:
                answer.set_exception(error)
                return
            if isinstance(made, Future):
                made.add_done_callback(pass_on)
            else:
                answer.set_result(made)

        stopped.add_done_callback(act)
        return answer

    def at_commit(self, mode: PauseMode) -> PauseMode:
        """The mode of a commit that names `mode`: a pause `retract` retracts.

        So does one that has taken force and could not drop the caches.
        """
        pause = self._forced_mode if self.owes_flush else self.mode
        is_stricter = mode is PauseMode.IN_PLACE and pause is PauseMode.RETRACT
        return PauseMode.RETRACT if is_stricter else mode

    # ---------------------------------------------------------------- helpers
    def _wait(self, seconds: float | None = None) -> None:
        """Wait for an update: `PATIENCE_S`, or `seconds` more than that."""
        if self._timer is not None:
            self._timer.cancel()
        self._num_seen = self._num_ended()
        timer = threading.Timer(
            PATIENCE_S if seconds is None else seconds,
            lambda: self._controller.step_queue.submit(look),
        )

        def look() -> None:
            if self._timer is not timer:
                return  # renewed, ended or in force
            is_busy = self._controller.updates.ledger.active is not None
            if is_busy or self._num_ended() != self._num_seen:
                self._wait()
            elif seconds is None:
                self._wait(QUEUED_S)
            else:
                self.enforce(Need.NO_UPDATE)

        timer.name, timer.daemon = "inflight-absorbed", True
        self._timer = timer
        timer.start()

    def _num_ended(self) -> int:
        return sum(self._controller.updates.ledger.ended.values())
