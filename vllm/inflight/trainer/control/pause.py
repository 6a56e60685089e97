"""A pause of one or more engines that a `with` block renews and ends.

The engine ends a pause with a lease by itself, unless the pause is renewed. So a
trainer that dies does not park its engines. Before each renewal the engine is asked
whether the pause is still in force: a renewal after its end would be another pause.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from vllm.inflight.background import Background
from vllm.inflight.errors import (
    Cancelled,
    EngineUnreachable,
    InflightError,
    PauseConflict,
)
from vllm.inflight.trainer.engine_clients import Engine, blamed
from vllm.inflight.trainer.http_client import Reply
from vllm.inflight.trainer.retry import RetryBudget
from vllm.inflight.update import PauseMode

LEASE_S = 60.0
"""The lease of a pause in a `with` block that names none."""

ENDING_S = 10.0
"""Longest time to end a pause after an exception, before that exception is shown."""

Ask = Callable[[Sequence[Engine], Callable[[Engine], Reply], RetryBudget], list[Reply]]
"""Makes one call on each engine; raises the first failure."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class PauseLost(PauseConflict):
    """A pause ended, or became another owner's, before its `with` block ended."""

    remedy = (
        "Tokens may have been sampled in the block. Give an owner, or a longer lease."
    )


class Pause:
    """A pause in force, which a `with` block renews and ends.

    Attributes:
        replies: the reply of `POST /pause_generation`, by engine.
        lost: the error that ends the `with` block, if the pause was lost; else None.

    """

    def __init__(
        self,
        engines: Sequence[Engine],
        ask: Ask,
        timeout_s: float,
        *,
        mode: str,
        lease_s: float | None,
        owner: str | None,
        flush_cache: bool,
    ) -> None:
        self.replies: dict[str, Reply] = {}
        self.lost: PauseLost | None = None
        self._engines = engines
        self._ask = ask
        self._timeout_s = timeout_s
        self._body: Reply = {"mode": PauseMode.parse(mode).value, "lease_s": lease_s}
        self._body |= {"owner": owner, "flush_cache": flush_cache}
        self._counts: dict[str, list[Any]] = {}
        """By engine: how many leases had ended when the pause began."""
        self._ends = float("inf")
        """When the lease ends on the monotonic clock; engines may give it longer."""
        self._is_over = threading.Event()
        self._thread: Background | None = None
        self._drains = False

    @property
    def reply(self) -> Reply:
        """The reply of the first engine: mode, requests, `lease_s` and `owner`."""
        return next(iter(self.replies.values()))

    def check(self) -> None:
        """Raise `PauseLost` if the pause is known to be lost."""
        if self.lost is not None:
            raise self.lost

    def __enter__(self) -> Pause:
        """Renew the pause from now on; without a lease it takes one of 60 s."""
        try:
            self._hold()
        except BaseException:
            self._end_quietly()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Continue decoding, also after an exception.

        Raises:
            PauseLost: decoding went on before, or another owner has the pause now.
            InflightError: an engine rejected the call or does not answer.

        """
        try:
            timeout_s = self._timeout_s
            self._end(timeout_s if error is None else min(ENDING_S, timeout_s))
        except InflightError as failure:
            if error is None:
                raise
            logger.error("a pause was not ended as it should be: %s", failure)
            error.add_note(f"a pause was not ended as it should be: {failure}")

    # ------------------------------------------------------------ begin, renew, end
    def _begin(self, budget: RetryBudget) -> None:
        """Pause every engine, or none."""
        # One engine that rejects the pause is as it was.
        several = len(self._engines) > 1
        before = self._states(budget) if several else {}
        began = time.monotonic()
        # A pause that drains replies when requests have ended, maybe after its lease.
        is_wait = self._body["mode"] == PauseMode.WAIT
        self._drains = bool(is_wait and self._body["lease_s"])
        draining = self._renewing(self._renew_draining) if self._drains else None
        try:
            replies = self._ask(
                self._engines, lambda engine: engine.pause(self._body, budget), budget
            )
        except BaseException:
            for engine in self._engines if several else ():
                if not _is_paused(before[engine.name]):
                    with suppress(InflightError):
                        engine.resume(self._body["owner"], RetryBudget(ENDING_S))
            raise
        finally:
            if draining is not None:
                self._stop(draining)
        names = (engine.name for engine in self._engines)
        self.replies = dict(zip(names, replies, strict=True))
        self._ends = began + (self._body["lease_s"] or float("inf"))

    def _hold(self) -> None:
        budget = RetryBudget(self._timeout_s)
        if self._body["lease_s"] is None or self._drains:
            self._body["lease_s"] = self._body["lease_s"] or LEASE_S
            self._renew(budget)
        states = self._states(budget)
        self._counts = {name: _expired(state) for name, state in states.items()}
        self._require_held(states)
        if self._body["lease_s"]:
            self._thread = self._renewing(self._renew)

    def _renewing(self, renew: Callable[[RetryBudget], None]) -> Background:
        self._is_over = is_over = threading.Event()
        every_s = self._body["lease_s"] / 3

        def run() -> None:
            while not is_over.wait(every_s):
                try:
                    renew(RetryBudget(every_s))
                except EngineUnreachable as error:
                    logger.warning("a pause was not renewed yet: %s", error)
                except PauseLost as error:
                    return self._lose(error)
                except Exception as error:
                    return self._lose(PauseLost(f"it cannot be renewed: {error}"))

        thread = Background(run, name="inflight-pause", end=is_over.set)
        thread.start()
        return thread

    def _stop(self, thread: Background) -> None:
        self._is_over.set()
        thread.join()

    def _lose(self, error: PauseLost) -> None:
        if not self._is_over.is_set():
            self.lost = error
            logger.error("a pause was lost: %s", error)

    def _renew(self, budget: RetryBudget) -> None:
        if self._counts:
            self._require_held(self._states(budget))
        began = time.monotonic()
        # Caches were dropped by the first call, if they had to be.
        body = self._body | {"flush_cache": False}
        self._ask(self._engines, lambda engine: engine.pause(body, budget), budget)
        self._ends = began + self._body["lease_s"]

    def _renew_draining(self, budget: RetryBudget) -> None:
        # The reply comes when requests have ended. The lease is renewed before that.
        for engine in self._engines:
            with suppress(InflightError):
                if _is_paused(engine.pause_state(budget)):
                    engine.pause(self._body, budget)

    def _states(self, budget: RetryBudget) -> dict[str, Reply]:
        states = self._ask(self._engines, lambda e: e.pause_state(budget), budget)
        names = (engine.name for engine in self._engines)
        return dict(zip(names, states, strict=True))

    def _require_held(self, states: dict[str, Reply]) -> None:
        for name, state in states.items():
            if (why := self._why_lost(name, state)) is not None:
                raise PauseLost(f"{name}: {why}")

    def _why_lost(self, name: str, state: Reply) -> str | None:
        """Why an engine is not paused by this pause any more; None if it is."""
        owner = self._body["owner"]
        if not _is_paused(state):
            return "decoding was continued, or the lease of the pause ran out"
        for each in state.get("engines", [state]):
            if each.get("owner", owner) != owner:
                return f"the pause of {owner!r} is now one of {each['owner']!r}"
        if _expired(state) != self._counts.get(name, _expired(state)):
            return "the lease of the pause ran out, and decoding went on meanwhile"
        if "leases_expired" not in state and time.monotonic() > self._ends:
            return "the lease of the pause may have run out before it was renewed"
        return None

    def _end(self, timeout_s: float) -> None:
        """Continue every engine that this pause still holds."""
        if self._thread is not None:
            self._stop(self._thread)
        budget = RetryBudget(timeout_s)
        failures: list[InflightError] = []
        for engine in self._engines:
            try:
                state = engine.pause_state(budget)
                if (why := self._why_lost(engine.name, state)) is not None:
                    raise PauseLost(why)
                engine.resume(self._body["owner"], budget)
            except InflightError as error:
                blamed(error, engine)
                failures.append(error)
        self.check()
        if failures:
            raise failures[0]

    def _end_quietly(self) -> None:
        with suppress(InflightError):
            self._end(min(ENDING_S, self._timeout_s))


class AsyncPause:
    """A pause of an `AsyncControlClient`: await it, or use it in `async with`.

    Attributes:
        pause: the pause with its `reply`, and its error if it was lost.

    """

    def __init__(self, pause: Pause, calls: Calls, timeout_s: float) -> None:
        self.pause = pause
        self._calls = calls
        self._timeout_s = timeout_s

    def __await__(self) -> Generator[Any, None, Pause]:
        """Pause; the result is a `Pause` with the reply."""
        return self._begun().__await__()

    async def _begun(self) -> Pause:
        budget = RetryBudget(self._timeout_s)
        await self._calls.run(partial(self.pause._begin, budget), budget)
        return self.pause

    async def __aenter__(self) -> Pause:
        """Pause, and renew the pause from now on."""
        budget = RetryBudget(self._timeout_s)
        if self.pause._body["lease_s"] is None:
            self.pause._body["lease_s"] = LEASE_S

        def begin() -> Pause:
            self.pause._begin(budget)
            return self.pause.__enter__()

        return await self._calls.run(begin, budget, self._undo)

    def _undo(self, failure: BaseException | None) -> None:
        # After a lost reply the pause may be in force.
        if failure is None or isinstance(failure, EngineUnreachable | Cancelled):
            self.pause._end_quietly()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Continue decoding; raises as the `with` of a `Pause` does."""
        await self._calls.run(partial(self.pause.__exit__, kind, error, None))


Undo = Callable[[BaseException | None], None]


class Calls:
    """Blocking calls in threads of their own, so that an event loop goes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()

    async def run(
        self,
        call: Callable[[], T],
        budget: RetryBudget | None = None,
        undo: Undo | None = None,
    ) -> T:
        """Run `call` in a thread.

        Args:
            call: that is run.
            budget: of the call, which stops trying when the task is cancelled.
            undo: called in a thread after a call whose task was cancelled, with what
                the call raised.

        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # a call cannot be stopped from outside
        is_left = is_over = False
        failure: BaseException | None = None

        def work() -> None:
            nonlocal is_over, failure
            result = None
            try:
                result = call()
            except BaseException as error:
                failure = error
            with self._lock:  # else both of them would undo it
                is_over, was_left = True, is_left
            if was_left and undo is not None:
                undo(failure)
            self._running.discard(future)
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        self._running.add(future)
        Background(work, name="inflight-control").start()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                is_left, was_over = True, is_over
            if budget is not None:
                budget.give_up(Cancelled("the task that made this call was cancelled"))
            if was_over and undo is not None:
                Background(partial(undo, failure), name="inflight-control").start()
            raise

    async def settle(self) -> None:
        """Wait for the calls whose tasks were cancelled, for some seconds at most."""
        ends = time.monotonic() + ENDING_S
        while self._running and time.monotonic() < ends:
            await asyncio.sleep(0.01)


def _is_paused(state: Reply) -> bool:
    return all(each["is_paused"] for each in state.get("engines", [state]))


def _expired(state: Reply) -> list[Any]:
    """How many leases have ended, on each data-parallel engine."""
    return [each.get("leases_expired") for each in state.get("engines", [state])]
