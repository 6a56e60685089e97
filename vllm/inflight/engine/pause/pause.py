"""Pause modes: what happens to requests when decoding stops or weights change.

| mode     | running requests                 | their KV | waiting requests |
|----------|----------------------------------|----------|------------------|
| wait     | run to their end                 | –        | queued           |
| in_place | frozen where they are            | kept     | queued           |
| retract  | back to the front of the queue   | freed    | queued           |
| abort    | finished now, with their tokens  | freed    | finished too     |

A pause takes effect between two steps. A commit treats requests in the same way and
does not stop decoding. With `wait`, a commit queues new requests until the running ones
are done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.pause import abort
from vllm.inflight.engine.pause.absorption import LATER, Absorption, Need
from vllm.inflight.engine.pause.lease import Lease, lease_seconds
from vllm.inflight.engine.scheduling import kv_connectors, request_checks
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.engine.switch import Switch, WaitingSwitch
from vllm.inflight.engine.transaction import Update
from vllm.inflight.errors import (
    DeadlineExceeded,
    InflightError,
    PauseConflict,
    UpdateBusy,
)
from vllm.inflight.update import PAUSE_MOVES, STRICTNESS, PauseMode, check_owner

logger = upstream.init_logger(__name__)

Reply = dict[str, Any]


class Pauses:
    """The pause of one engine core, while there is one."""

    def __init__(
        self,
        core: upstream.EngineCore,
        controller: EngineContext,
        *,
        lease_s: float,
        absorbs: bool = False,
    ) -> None:
        self._core = core
        self._controller = controller
        self.asked: PauseMode | None = None
        """The mode that a call of ours asked for; upstream's own calls set none."""
        self._lease = Lease(controller.step_queue.submit, self._expire)
        self._lease_s = lease_s
        self._settling: list[Future[Reply]] = []
        """Replies to pauses that wait for steps in flight before they take effect."""
        self.commit: WaitingSwitch | None = None
        """The commit or rollback that waits for running requests; None if none does."""
        self.absorption = Absorption(controller, self._take_force, is_on=absorbs)

    @property
    def is_paused(self) -> bool:
        """Whether decoding is stopped, or stops after the steps in flight."""
        return bool(self._core.is_scheduler_paused())

    @property
    def mode(self) -> PauseMode | None:
        """The mode of the current pause, also of upstream's; None without a pause."""
        if not self.is_paused:
            return None
        if self.asked is not None:
            return self.asked
        is_frozen = self._core.scheduler.pause_state == upstream.PauseState.PAUSED_ALL
        return PauseMode.IN_PLACE if is_frozen else PauseMode.WAIT

    @property
    def told_mode(self) -> PauseMode | None:
        """The mode that clients are told; decoding goes on if it is absorbed."""
        return self.absorption.mode or self.mode

    # -------------------------------------------------------------- the calls
    def pause(
        self,
        mode: PauseMode,
        *,
        flush_cache: bool,
        lease_s: object = None,
        owner: object = None,
        is_trial: bool = False,
    ) -> Any:
        """Pause, make a pause stricter, or renew its lease.

        The reply comes when the mode has taken effect. The call may be repeated: in the
        mode that is in force it is a renewal, and requests queued since the pause began
        stay queued. A trial raises the errors of the pause, and otherwise replies and
        changes nothing.
        """
        started = time.perf_counter()
        owner, seconds = check_owner(owner), lease_seconds(lease_s, self._lease_s)
        if self.told_mode is not None:
            self._lease.check(owner)
        if mode not in PAUSE_MOVES[self.told_mode]:
            moves = PAUSE_MOVES[self.told_mode]
            may_follow = ", ".join(each for each in STRICTNESS if each in moves)
            raise PauseConflict(
                f"the engine is paused in mode {self.told_mode!s}, from which a pause "
                f"may go to {may_follow}, and not to {mode.value}. Continue first"
            )
        is_asked_for = self.is_paused and self.asked is mode
        is_renewal = is_asked_for or self.absorption.mode is mode
        if not is_renewal:
            self._check_mode(mode)
        if flush_cache:
            request_checks.check_flush(self._core.scheduler, mode, is_later=True)
        if is_trial:
            return self._reply(started)
        if self._controller.dp_commit.is_to_continue:
            # Its lease ran out here, and not yet on the other engines: they renew it.
            self._lease.drop()
            self._controller.dp_commit.disarm(
                PauseConflict("another pause came before decoding went on")
            )
        if self.absorption.takes(mode):
            return self._absorb(mode, flush_cache, owner, seconds)
        if self.absorption.mode is not None:
            self.absorption.end()
            self._controller.counts.enforced[Need.PAUSE.value] += 1
        counts = {"num_aborted": 0, "num_retracted": 0}
        if mode is PauseMode.ABORT and not is_renewal:
            counts |= abort.abort_requests(self._controller)
        stopped = self._stop(mode)
        self.asked = mode
        self._controller.counts.paused(mode)
        self._lease.take(owner, seconds)

        def settle() -> Reply:
            # A stricter pause may have replaced this one, and has treated the requests.
            if mode is PauseMode.RETRACT and self.asked is mode:
                counts["num_retracted"] = self._retract()
            flushed = self._flushed(media=True) if flush_cache else {"dropped": None}
            treated = self._controller.counts.treated(counts)
            reply: Reply = self._reply(started) | treated | flushed
            if not is_renewal:
                running, waiting = reply["num_running"], reply["num_waiting"]
                still = f"{running} requests running, {waiting} waiting"
                self._controller.events.paused(mode, owner, still, reply["seconds"])
            return reply

        return self._then(stopped, settle)

    def stop_for_release(
        self, mode: PauseMode, release: Callable[[Reply], Reply]
    ) -> Any:
        """Stop decoding, treat the requests as `mode` says, and then call `release`.

        `release` gets the counts of requests when no step is in flight any more. A
        pause that a pause call began stays in force. If its mode was `in_place` and the
        requests are retracted, its mode is `retract` from then on.
        """
        counts = {"num_aborted": 0, "num_retracted": 0}
        if mode is PauseMode.ABORT:
            counts |= abort.abort_requests(self._controller)
        stopped = self._stop(mode)

        def settle() -> Reply:
            if mode is PauseMode.RETRACT:
                counts["num_retracted"] = self._retract()
                self.note_retracted()
            return release(self._controller.counts.treated(counts))

        return self._then(stopped, settle)

    def note_retracted(self) -> None:
        """Change a pause `in_place` to `retract`, because its requests have no KV."""
        if self.asked is PauseMode.IN_PLACE:
            self.asked = PauseMode.RETRACT

    def resume(self, owner: object = None) -> Reply:
        """Continue decoding with the live weights. The call may be repeated."""
        started = time.perf_counter()
        if self.told_mode is not None:
            self._lease.check(check_owner(owner))
        if self.absorption.mode is not None:
            self._lease.drop()
            return self._end_absorbed(started)
        if self.commit is not None and self.asked is None:
            if self.commit.switch.update is not None:
                raise PauseConflict(
                    f"{self.commit.switch.what} waits for the running requests, and "
                    "new ones wait for it; abort that update to go on without it"
                )
            self.give_up(PauseConflict("decoding was continued before it was made"))
        is_of_all = self.is_paused and not self._gives_up_force()
        self._require_settled()
        dp_commit = self._controller.dp_commit
        if dp_commit.is_armed and not dp_commit.is_to_continue:
            raise PauseConflict(
                "a commit waits for the other data-parallel engines; continue after "
                "its reply"
            )

        def act() -> Reply:
            self._go_on(is_asked=True)
            self._lease.drop()
            self._controller.sleep.is_paused_by_sleep = False
            return self._reply(started)

        return dp_commit.continue_together(act) if is_of_all else act()

    def hold(self) -> bool:
        """Stop the scheduler again in the current mode; False if there is no pause."""
        mode = PauseMode.WAIT if self.asked is None and self.commit else self.asked
        if mode is not None:
            self._hold(mode)
        return mode is not None

    def flush(self) -> Reply:
        """Drop every cached block; rejected while a request holds one."""
        request_checks.check_flush(self._core.scheduler, PauseMode.IN_PLACE)
        return {"dropped": flush(self._core, media=True)}

    def state(self) -> Reply:
        """The pause, its mode, its owner and its lease, for `GET /is_paused`."""
        mode = self.told_mode
        return {
            "is_paused": mode is not None,
            "mode": mode and mode.value,
            "absorbed": self.absorption.mode is not None,
            "is_draining": self.mode is PauseMode.WAIT
            and SchedulerState.of(self._core.scheduler).is_busy(),
            "for_commit": self.commit is not None and self.asked is None,
            "owner": self._lease.owner,
            "lease_left_s": self._lease.left_s,
            "leases_expired": self._lease.num_expired,
        }

    def close(self) -> None:
        """End the lease, so that it does not outlive its engine."""
        self.absorption.end()
        self._lease.drop()

    # ------------------------------------------------------------- at a commit
    def check_commit(
        self, mode: PauseMode, *, flush_cache: bool = False, may_keep: bool = False
    ) -> None:
        """Raise if a commit cannot treat requests as `mode` says at this moment.

        With `may_keep`, a request that cannot be retracted may stay in place, unless
        other requests would read its KV of old weights, or caches are to be dropped.
        """
        scheduler = self._core.scheduler
        kv_connectors.check_commit(scheduler, mode)
        if flush_cache or not may_keep or self._would_share_old_kv():
            self._check_mode(mode)
        if flush_cache:
            request_checks.check_flush(self._core.scheduler, mode)
        if mode is PauseMode.WAIT and self._controller.dp_commit.is_kept:
            raise PauseConflict(
                "engines that step together do not end their requests together, so "
                "a commit cannot 'wait' for them; pause with 'wait' first"
            )
        frozen = self.mode not in (None, PauseMode.WAIT)
        if (
            mode is PauseMode.WAIT
            and frozen
            and SchedulerState.of(self._core.scheduler).active()
        ):
            raise PauseConflict(
                "mode 'wait' would wait for ever: running requests are paused"
            )

    def between_requests(self, mode: PauseMode, switch: Switch) -> Any:
        """Make `switch` now, or in mode `wait` when the running requests are done.

        The deadline of its update, or `longest_s`, bounds the wait. `give_up` ends it
        as well.
        """
        scheduler = self._core.scheduler
        if mode is not PauseMode.WAIT or not SchedulerState.of(scheduler).is_busy():
            return switch.make()

        def after() -> Reply:
            self.commit = None
            try:
                if (
                    SchedulerState.of(scheduler).active()
                    or SchedulerState.of(scheduler).sent_back()
                ):
                    raise PauseConflict(
                        f"requests were paused while {switch.what} waited for them; "
                        + switch.if_given_up
                    )
                kv_connectors.check_commit(scheduler, mode)
                # A sleep may have saved the old weights, and waking restores those.
                self._controller.sleep.check_weights(is_whole=True)
                return switch.make()
            finally:
                if self.asked is None:
                    self._go_on()

        answer = self._then(self._stop(PauseMode.WAIT), after)
        if isinstance(answer, Future):
            self.commit = waits = WaitingSwitch(switch, answer)
            self._end_in_time(waits)
        return answer

    def give_up(self, error: InflightError, update: Update | None = None) -> None:
        """End the wait of the commit of `update`, or of a rollback if that is None.

        New requests are scheduled again, and the waiting call gets `error`. Nothing
        happens if another switch waits, or none.
        """
        waits = self.commit
        if waits is None or waits.switch.update is not update:
            return
        self.commit = None
        self._settling.remove(waits.answer)
        if update is None:
            error.message = (
                f"{waits.switch.what} was given up: {error.message}; "
                f"{waits.switch.if_given_up}"
            )
        waits.answer.set_exception(error)
        if self.asked is None:
            self._go_on()

    def require_no_rollback(self) -> None:
        """Raise `UpdateBusy` while a rollback waits, since it needs its target."""
        if self.commit is not None and self.commit.switch.update is None:
            raise UpdateBusy(
                f"{self.commit.switch.what} waits for running requests; wait for it, "
                "or end it with POST /abort_weight_update or POST /continue_generation"
            )

    def treat(self, mode: PauseMode, *, flush_cache: bool = False) -> Reply:
        """Retract or abort requests as a commit in `mode` does; returns the counts."""
        facts: Reply = {}
        if mode is PauseMode.RETRACT:
            facts["num_retracted"] = self._retract()
        elif mode is PauseMode.ABORT:
            facts |= abort.abort_requests(self._controller)
        # The front end has dropped its media when it asked for the pause.
        flush_cache |= self.absorption.is_to_flush
        return facts | self._flushed(media=False) if flush_cache else facts

    def retract_or_abort(self, why: str) -> None:
        """Retract all requests, and abort those alone that cannot be retracted.

        Args:
            why: why their KV is useless already, as a clause.

        """
        scheduler = self._core.scheduler
        stuck = request_checks.unretractable(scheduler)
        facts = abort.abort_stuck(self._controller, stuck, why)
        facts["num_retracted"] = SchedulerState.of(scheduler).retract()
        self._controller.counts.treated(facts)

    # --------------------------------------------------------- absorbed pauses
    def _absorb(
        self,
        mode: PauseMode,
        flush_cache: bool,
        owner: str | None,
        seconds: float | None,
    ) -> Reply:
        started = time.perf_counter()
        is_renewal = self.absorption.mode is mode
        self.absorption.begin(mode, flush_cache=flush_cache)
        self._lease.take(owner, seconds)
        if flush_cache:
            # The front end has dropped its media, and sends each item again.
            self._core.reset_mm_cache()
        later: Reply = {"not_dropped": LATER} if flush_cache else {}
        reply = self._reply(started) | {"dropped": None} | later
        if not is_renewal:
            counts = f"{reply['num_running']} requests running"
            self._controller.events.absorbed(mode, owner, counts)
        return reply | {"num_aborted": 0, "num_retracted": 0}

    def _take_force(self, mode: PauseMode, flush_cache: bool) -> Any:
        """Stop decoding for a pause that was absorbed until now."""
        stopped = self._stop(mode)
        self.asked = mode
        self._controller.counts.paused(mode)

        def settle() -> Reply:
            if mode is PauseMode.RETRACT and self.asked is mode:
                self._controller.counts.treated({"num_retracted": self._retract()})
            flushed = self._flushed(media=False) if flush_cache else {}
            if why := flushed.get("not_dropped"):
                logger.warning("the pause has taken force, and %s", why)
            return flushed

        return self._then(stopped, settle)

    def _end_absorbed(self, started: float) -> Reply:
        """End the absorbed pause; decoding has never stopped for it."""
        mode = self.absorption.mode
        assert mode is not None
        self.absorption.end()
        self._controller.events.absorbed_ended(mode)
        return self._reply(started)

    def _gives_up_force(self) -> bool:
        """Whether it no longer waits for other data-parallel engines to stop with it.

        Each of them decides by itself that an absorbed pause takes force. If decoding
        goes on before they have agreed, some of them may never stop.
        """
        is_alone = self._controller.dp_commit.num_pauses_left == 0
        if not (self.absorption.is_settling and is_alone and self._is_pending):
            return False
        self._core.pending_pause = False
        return True

    # ---------------------------------------------------------------- helpers
    def _flushed(self, *, media: bool) -> Reply:
        """Drop the caches; a failure goes into the reply, since it comes too late."""
        try:
            dropped = flush(self._core, media=media)
        except PauseConflict as error:
            return {"dropped": None, "not_dropped": error.message}
        self.absorption.owes_flush = False
        return {"dropped": dropped}

    def _retract(self) -> int:
        """Retract all requests but those that cannot be; returns their number.

        A request that came after an absorbed pause may be such a one.
        """
        scheduler = self._core.scheduler
        stuck = request_checks.unretractable(scheduler)
        if stuck:
            named = request_checks.joined(stuck)
            logger.warning("%s cannot be retracted and stays in place", named)
        besides = {name for names in stuck.values() for name in names}
        return SchedulerState.of(scheduler).retract(besides=besides)

    def _would_share_old_kv(self) -> bool:
        """Whether other requests would read KV of requests that stay in place.

        They would by a connector, or because a pause that was absorbed has to drop the
        cache, and nothing else keeps versions apart in it.
        """
        scheduler = self._core.scheduler
        if kv_connectors.default_mode(scheduler) != PauseMode.IN_PLACE:
            return True
        is_shared = SchedulerState.of(scheduler).policy.oldest is None
        return is_shared and self.absorption.is_to_flush

    def _check_mode(self, mode: PauseMode) -> None:
        request_checks.check_mode(
            self._core.scheduler, mode, in_process=self._controller.in_process
        )

    def _stop(self, mode: PauseMode) -> Future[Any] | None:
        """Stop the scheduler; the Future is done when no step is in flight."""
        if not self._controller.in_process:
            # Upstream's "abort" ends every request, also when a pause is renewed.
            # What this pause aborts has ended already, so nothing is left to wait for.
            name = "wait" if _holds_new(mode) else "keep"
            pending: Future[Any] | None = self._core.pause_scheduler(name, False)
            return pending
        before = self._core.scheduler.pause_state
        self._hold(mode)
        try:
            self._controller.drain()
            self._core.model_executor.collective_rpc("synchronize_device")
        except BaseException:  # Ctrl-C, too: the caller would not know of the pause
            self._core.scheduler.set_pause_state(before)
            raise
        return None

    def _end_in_time(self, waits: WaitingSwitch) -> None:
        """Give up a rollback after its longest wait."""
        if (longest_s := waits.switch.longest_s) is None:
            return

        def end() -> None:
            if self.commit is waits:
                self.give_up(
                    DeadlineExceeded(f"requests still ran after {longest_s:g} s"),
                    waits.switch.update,
                )

        timer = threading.Timer(
            longest_s, lambda: self._controller.step_queue.submit(end)
        )
        timer.name, timer.daemon = "inflight-waiting", True
        waits.answer.add_done_callback(lambda _: timer.cancel())
        timer.start()

    def _hold(self, mode: PauseMode) -> None:
        states = upstream.PauseState
        state = states.PAUSED_NEW if _holds_new(mode) else states.PAUSED_ALL
        self._core.scheduler.set_pause_state(state)

    def _expire(self) -> Any:
        """Continue, because the lease has run out; a Future if engines step together.

        Raises:
            PauseConflict: the pause has not taken effect on every engine yet.

        """
        started = time.perf_counter()

        def act() -> Reply:
            self._go_on()
            return self._reply(started)

        if self.absorption.mode is not None:
            return self._end_absorbed(started)
        may_go_on = self.commit is None and self._controller.sleep.may_go_on()
        if not (self.is_paused and may_go_on) or self._gives_up_force():
            return act()
        self._require_settled()
        return self._controller.dp_commit.continue_together(act)

    def _require_settled(self) -> None:
        """Raise `PauseConflict` while data-parallel engines agree on a pause."""
        if self._is_pending:
            raise PauseConflict(
                "not every data-parallel rank has paused; continue after the reply"
            )

    @property
    def _is_pending(self) -> bool:
        """Whether data-parallel engines that step together agree on a pause."""
        return bool(getattr(self._core, "pending_pause", False))

    def _go_on(self, *, is_asked: bool = False) -> None:
        if self.commit is None and self._controller.sleep.may_go_on(is_asked):
            # First, since it raises where engines step together and must wait.
            self._controller.dp_commit.resume()
        mode, self.asked = self.asked, None
        self.absorption.owes_flush = False
        seconds = self._controller.counts.resumed()
        if mode is not None:
            self._controller.events.continued(mode, seconds)
        kept = None if self.commit is None else self.commit.answer
        for pending in self._settling:
            if pending is not kept:
                pending.set_exception(
                    PauseConflict("decoding went on before the pause took effect")
                )
        self._settling = [pending for pending in self._settling if pending is kept]
        if self.commit is not None:
            # The pause is over, and the commit still waits for running requests.
            self._hold(PauseMode.WAIT)
        # An idle engine loop would keep waiting for its input queue.
        self._controller.wake()

    def _then(self, pending: Future[Any] | None, call: Callable[[], Reply]) -> Any:
        """Run `call` now, or when `pending` is done, on the thread that finishes it."""
        if pending is None:
            return call()
        result: Future[Reply] = Future()
        self._settling.append(result)

        def done(finished: Future[Any]) -> None:
            if result not in self._settling:
                return  # another call has answered it already
            self._settling.remove(result)
            try:
                finished.result()
                result.set_result(call())
            except Exception as error:
                result.set_exception(error)

        pending.add_done_callback(done)
        return result

    def _reply(self, started: float) -> Reply:
        running, waiting = self._core.scheduler.get_request_counts()
        mode = self.told_mode
        return {
            "paused": mode is not None,
            "mode": mode and mode.value,
            "absorbed": self.absorption.mode is not None,
            "num_running": running,
            "num_waiting": waiting,
            "weight_version": self._controller.version.label,
            "lease_s": self._lease.left_s,
            "owner": self._lease.owner,
            "seconds": round(time.perf_counter() - started, 6),
        }


def _holds_new(mode: PauseMode) -> bool:
    """Whether a pause in `mode` holds new requests and lets running ones go on.

    After an abort no request is left that could.
    """
    return mode in (PauseMode.WAIT, PauseMode.ABORT)


def flush(core: upstream.EngineCore, *, media: bool) -> dict[str, Any]:
    """Drop every cache of an engine that holds no request's KV.

    Args:
        core: upstream's.
        media: also drop preprocessed images and audio. The front end caches the same
            items and then sends only their names. So it must drop its own first.

    Returns:
        `blocks`: number of KV blocks dropped. `connector`: True if the connector's
        cache was dropped, False if the connector did not confirm it, None without a
        connector. `encoder_outputs`: number of outputs of the media encoder dropped.

    Raises:
        PauseConflict: blocks are in use, or the connector refused.

    """
    scheduler = core.scheduler
    manager = scheduler.kv_cache_manager
    num_blocks = len(manager.block_pool.cached_block_hash_to_block)
    num_encoded = len(scheduler.encoder_cache_manager.cached)
    if not scheduler.reset_prefix_cache():
        raise PauseConflict(
            "flush_cache found blocks in use; pause with 'retract' and flush again"
        )
    is_dropped = _flush_connector(scheduler.connector)
    if media:
        core.reset_mm_cache()
    core.reset_encoder_cache()
    return {
        "blocks": num_blocks,
        "connector": is_dropped,
        "encoder_outputs": num_encoded,
    }


def _flush_connector(connector: upstream.KVConnectorBase_V1 | None) -> bool | None:
    if connector is None:
        return None
    answer = connector.reset_cache()
    if answer is False:
        raise PauseConflict(
            f"{type(connector).__name__} could not reset its cache; try again when its "
            "transfers are over"
        )
    # None is upstream's "not implemented": the connector still has its cache.
    return answer is True
