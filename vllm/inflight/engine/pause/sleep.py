"""Sleep: the state of an engine's weights, and which calls that state allows.

| weights   | cause                                | updates      | decoding           |
|-----------|--------------------------------------|--------------|--------------------|
| `live`    | the weights are complete             | all          | if KV is awake too |
| `asleep`  | a sleep of level 1 or 2              | none         | no                 |
| `gone`    | waking up from level 2, or a failed  | of all       | after an update of |
|           | out-of-band write                    | tensors only | all tensors        |
| `loading` | an out-of-band reload has begun      | none         | when it has ended  |

Upstream puts the engine to sleep and wakes it up. This module decides which control
calls are allowed meanwhile, and whether the engine decodes. outside_writes.py detects
out-of-band writes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.inflight import calls, upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.pause import pause
from vllm.inflight.engine.pause.absorption import Need
from vllm.inflight.engine.scheduling import request_checks
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.errors import (
    BaseMismatch,
    ConfigError,
    EngineAsleep,
    EngineFault,
    PauseConflict,
    UpdateBusy,
)
from vllm.inflight.update import KV_CACHE, WEIGHTS, PauseMode
from vllm.inflight.worker.memory.placement import is_wanted

logger = upstream.init_logger(__name__)

FILLING = (
    *(calls.StartUpdate, calls.ReceiveChunk, calls.PrepareUpdate, calls.CommitUpdate),
    *(calls.RollBack, calls.UndoSwitch, calls.FindUnused),
)
READING = (
    *(calls.ReadChecksums, calls.ReadRows, calls.RenameVersion, calls.VerifyWeights),
)
"""Control calls that fill the weights' memory, and calls that read or label it."""

GIVEN_UP = "a sleep of level 2 has given the weights up"


class Sleep:
    """The sleep of one engine core, whichever call began it."""

    def __init__(self, core: upstream.EngineCore, controller: EngineContext) -> None:
        self._core = core
        self._controller = controller
        self._level_under_way = 0
        """The level of a sleep that has not released memory yet; requests may run."""
        self._under_way: Future[Any] | None = None
        """The Future of that sleep, while requests have to end first."""
        self._lost: str | None = None
        """Why the weights are lost; None if they are not, or are filled again."""
        self._loading: str | None = None
        """The call that has begun a reload of live weights and has not ended it."""
        self._released: tuple[str | None, set[str], upstream.PauseState] | None = None
        """The last release: its id, its parts, and the pause state before it."""
        self._paused_before = upstream.PauseState.UNPAUSED
        """The pause state when the workers put themselves to sleep: a pause that
        upstream's call has begun stays when they wake up."""
        self.is_paused_by_sleep = False
        """True during a sleep of level 0, which pauses and releases no memory."""

    @property
    def weights(self) -> str:
        """`live`, `asleep`, `gone` or `loading`."""
        if self._level_under_way or WEIGHTS in self._core.model_executor.sleeping_tags:
            return "asleep"
        if self._loading is not None:
            return "loading"
        return "live" if self._lost is None else "gone"

    @property
    def detail(self) -> str | None:
        """Why the engine cannot decode with its weights; None if they are live."""
        state = self.weights
        if state == "asleep":
            return "the weights of this engine are asleep"
        if state == "loading":
            return (
                f"{self._loading} has begun a reload of the live weights and has not "
                "ended it. Decoding goes on when it has. POST /abort_weight_update "
                "ends it and restores the weights. The engine does so by itself when "
                "--inflight-update-deadline-s has passed since the last call"
            )
        if state == "gone":
            has_come = self._controller.outside_writes.progress()
            return f"{self._lost}; decoding waits for all weights{has_come}"
        return None

    @property
    def may_decode(self) -> bool:
        """Whether weights and KV cache are awake, and the weights complete."""
        return self.weights == "live" and not self._core.model_executor.is_sleeping

    def may_go_on(self, is_asked: bool = False) -> bool:
        """Whether the engine decodes again when a pause ends.

        A sleep of level 0 prevents it, unless a call asked to continue (`is_asked`).
        """
        return self.may_decode and (is_asked or not self.is_paused_by_sleep)

    def check(self, call: calls.Call) -> None:
        """Raise if a control call needs weights that are missing.

        See `check_weights` for the errors.
        """
        is_resume = isinstance(call, calls.ResumeDecoding)
        if is_resume and self.weights == "loading":
            raise UpdateBusy(str(self.detail))
        if is_resume and not self.may_decode:
            raise EngineAsleep(
                f"the engine is asleep (weights: {self.weights}); decoding goes on "
                "when all of it has been woken up and its weights are complete"
                + (f": {self.detail}" if self.weights == "gone" else "")
            )
        if isinstance(call, FILLING):
            manifest = call.manifest if isinstance(call, calls.StartUpdate) else None
            # A manifest that is not an object is rejected later, awake or asleep.
            told = manifest if isinstance(manifest, dict) else {}
            if told.get("base") and self.weights == "gone":
                raise BaseMismatch(
                    f"{self.detail}; a delta has no version to start from",
                    remedy="Send the whole version.",
                )
            is_part = told.get("subset") or told.get("draft") or told.get("base")
            self.check_weights(is_whole=not is_part)
        elif isinstance(call, READING):
            self.check_weights(is_whole=False)

    def check_weights(self, *, is_whole: bool) -> None:
        """Raise if the weights are missing, unless this call brings all of them.

        Raises:
            EngineAsleep: the weights are asleep, or lost and not all of them come.
            UpdateBusy: an out-of-band reload is under way.

        """
        if self.weights == "loading":
            raise UpdateBusy(str(self.detail))
        if self.weights == "asleep" or (self.weights == "gone" and not is_whole):
            raise EngineAsleep(
                f"{self.detail}; there are none to read, to name or to leave in place"
            )

    def lose(self, why: str) -> None:
        """Mark the weights as lost, and stop decoding until an update fills them.

        Args:
            why: the reason, as a clause for messages.

        """
        self._lost, self._loading = why, None
        self._hold()

    def begin_load(self, name: str) -> None:
        """Stop decoding, because the call `name` has begun to reload layers."""
        self._loading = name
        self._hold()

    def end_load(self) -> None:
        """Continue decoding, because every layer has its memory again."""
        if self._loading is not None:
            self._loading = None
            self._go_on()

    @property
    def loading(self) -> str | None:
        """The call that has begun a reload of live weights; None if none is open."""
        return self._loading

    @property
    def is_lost(self) -> bool:
        """Whether the weights are lost, whether they are awake or asleep."""
        return self._lost is not None

    def sleep(
        self, level: int, sleep: Callable[[int], Any], mode: str = "abort"
    ) -> Any:
        """Call `sleep` when no rank works on its shadow weights any more.

        An absorbed pause takes force first.

        Mode `keep` retracts the requests, because the contents of the KV cache are
        lost. A second call while the first waits for requests keeps the level of the
        first, and treats requests in its own mode.

        Raises:
            PauseConflict: mode `keep`, and a request cannot be retracted; nothing has
                changed.
            EngineFault: a transfer did not stop, or a host lacks memory for the copy.
                The engine stays awake; its update under way has ended.

        """
        return self._controller.pauses.absorption.before(
            Need.SLEEP, lambda: self._sleep(level, sleep, mode)
        )

    def _sleep(self, level: int, sleep: Callable[[int], Any], mode: str) -> Any:
        if level < 1:
            answer = sleep(level)
            self.is_paused_by_sleep = True
            return answer
        if mode == "keep":
            request_checks.check_mode(
                self._core.scheduler,
                PauseMode.RETRACT,
                in_process=self._controller.in_process,
            )
            self._check_kv(self._core.scheduler)
        if self.weights == "asleep":
            answer = sleep(self._level_under_way or level)
            self._note_kept(mode)
            return answer
        # What code beside the engine has given back before is no part of this sleep.
        self._controller.outside_writes.before_call(is_certain=False)
        self._controller.outside_writes.abort("the engine was put to sleep")
        self._level_under_way = level
        try:
            self._controller.updates.end(EngineAsleep("the engine was put to sleep"))
            self._controller.ranks.prepare_sleep(level)
            answer = sleep(level)
        except BaseException as error:
            self._slept(level, error)
            raise
        self._note_kept(mode)
        if isinstance(answer, Future):
            self._under_way = answer
            answer.add_done_callback(lambda done: self._slept(level, done.exception()))
        else:
            self._slept(level, None)
        return answer

    @property
    def gives_weights_alone(self) -> bool:
        """Whether the weights can be released while the KV cache stays.

        Weights in the arena can. Upstream puts all its memory pools to sleep at once.
        """
        return self._gives_parts and is_wanted(self._core.vllm_config)

    @property
    def _gives_parts(self) -> bool:
        """Whether upstream can release a part of its memory: from 0.31 on."""
        return hasattr(self._core.model_executor, "discard")

    def release(
        self,
        tags: set[str],
        mode: PauseMode | None,
        *,
        is_trial: bool = False,
        release_id: str | None = None,
    ) -> Any:
        """Release the parts of the memory that `tags` name, until they are woken up.

        The host keeps a copy of the weights. The contents of the KV cache are lost, so
        no request may hold KV in it. Parts that sleep already stay as they are; if all
        of them do, no request is touched. A trial raises the errors of the release, and
        otherwise replies and changes nothing.

        Args:
            tags: `weights`, `kv_cache`.
            mode: `abort`, `retract` or `in_place`, for the requests. None: the mode of
                a pause `in_place` or `retract`, else `abort`.
            is_trial: whether this is a trial.
            release_id: id by which `undo_release` names this release.

        Raises:
            PauseConflict: a request cannot be kept as `mode` says; nothing has changed.
            EngineFault: the memory could not be released.

        """
        act = partial(self._release, tags, mode, is_trial, release_id)
        if is_trial:
            return act()
        return self._controller.pauses.absorption.before(Need.RELEASE, act)

    def _release(
        self,
        tags: set[str],
        mode: PauseMode | None,
        is_trial: bool,
        release_id: str | None,
    ) -> Any:
        if self._under_way is not None:
            raise PauseConflict(
                "another call is releasing memory of this engine; wait for its reply"
            )
        executor = self._core.model_executor
        self._released = None
        parts = set(tags)
        if WEIGHTS in parts and not self.gives_weights_alone:
            parts.add(KV_CACHE)
        parts -= executor.sleeping_tags
        if parts == {KV_CACHE} and not self._gives_parts:
            raise ConfigError(
                "this vLLM cannot release its KV cache alone; release the weights with "
                "it, or install vLLM 0.31 or newer"
            )
        if mode is None:
            pauses = self._controller.pauses
            mode = pauses.asked or pauses.absorption.mode
            if mode not in (PauseMode.IN_PLACE, PauseMode.RETRACT):
                mode = PauseMode.ABORT
        reply = {"released": sorted(parts), "mode": mode.value}
        if parts:
            self._check_release(parts, mode, is_forced=KV_CACHE not in tags)
        if is_trial or not parts:
            return reply | {"num_aborted": 0, "num_retracted": 0}
        has_weights = WEIGHTS in parts
        before = self._core.scheduler.pause_state
        if has_weights:
            self._controller.outside_writes.abort("the weights were put to sleep")
            self._level_under_way = 1

        def ended(error: BaseException | None) -> None:
            self._under_way = None
            if has_weights:
                self._slept(1, error)
            else:
                self._controller.outside_writes.acknowledge_sleep()
            if error is None:
                self._released = (release_id, parts, before)
            else:
                self._not_released(parts, before)

        def give_back(counts: dict[str, Any]) -> dict[str, Any]:
            if KV_CACHE in parts:
                self._drop_caches()
            try:
                if len(parts) > 1 or (has_weights and not self.gives_weights_alone):
                    executor.sleep(1)
                else:
                    executor.discard(tuple(parts))
            except Exception as error:
                logger.exception("memory could not be released")
                raise EngineFault(
                    f"memory ({', '.join(sorted(parts))}) could not be released: "
                    f"{type(error).__name__}: {error}"
                    + ("; requests were aborted" if mode is PauseMode.ABORT else "")
                ) from error
            return reply | counts

        try:
            if has_weights:
                self._controller.updates.end(
                    EngineAsleep("the engine was put to sleep")
                )
                self._controller.ranks.prepare_sleep(1)
            answer = self._controller.pauses.stop_for_release(mode, give_back)
        except BaseException as error:
            ended(error)
            raise
        if isinstance(answer, Future):
            self._under_way = answer
            answer.add_done_callback(lambda done: ended(done.exception()))
        else:
            ended(None)
        return answer

    def undo_release(self, release_id: str | None) -> None:
        """Wake up the memory of the last release, because another engine failed.

        Nothing happens if the last release has another id. Requests that the release
        has retracted or aborted stay retracted or aborted.
        """
        if self._released is None or self._released[0] != release_id:
            return
        (_, parts, before), self._released = self._released, None
        self._core.model_executor.wake_up(sorted(parts))
        self._controller.outside_writes.acknowledge_sleep()
        self._not_released(parts, before)

    def release_kv_cache(self, release: Callable[[], Any]) -> Any:
        """Release the KV cache during a pause, and keep the requests of the pause.

        Without requests upstream's `release` does it. Upstream rejects the call if
        there are requests, even those that its pause keeps.
        """
        return self._controller.pauses.absorption.before(
            Need.RELEASE, lambda: self._release_kv_cache(release)
        )

    def _release_kv_cache(self, release: Callable[[], Any]) -> Any:
        core, asked = self._core, self._controller.pauses.asked
        if not core.is_scheduler_paused() or not core.scheduler.requests:
            answer = release()
            self._controller.outside_writes.acknowledge_sleep()
            return answer
        is_in_place = asked is PauseMode.IN_PLACE
        mode = PauseMode.IN_PLACE if is_in_place else PauseMode.RETRACT
        return self.release({KV_CACHE}, mode)

    def wake(self, wake: Callable[[], bool]) -> Any:
        """Call `wake`. A pause that a pause call began stays in force.

        While a sleep waits for requests, waking waits for it too and returns a Future.
        Otherwise the sleep would release memory of an engine that decodes.
        """
        if self._under_way is not None:
            woken: Future[bool] = Future()
            self._under_way.add_done_callback(lambda _: self._wake_later(woken, wake))
            return woken
        self._released = None
        self._controller.outside_writes.before_call(is_certain=False)
        dp_commit = self._controller.dp_commit
        stood_still = dp_commit.is_kept and not self._core.engines_running
        were_asleep = self.weights == "asleep"
        is_awake = wake()
        self._controller.outside_writes.acknowledge_sleep()
        if were_asleep and self.weights == "gone" and self._lost == GIVEN_UP:
            self._controller.outside_writes.make_blank(keeps_some=True)
        elif were_asleep:
            self._controller.outside_writes.take_back_fill()
        if is_awake:
            self.is_paused_by_sleep = False
            is_held = self._hold()
            if stood_still:
                dp_commit.settle(is_held)
            self._controller.wake()
            self._tell_awake()
            if self.weights == "gone":
                logger.warning("the engine is awake without weights: %s", self.detail)
        return is_awake

    def _check_release(
        self, parts: set[str], mode: PauseMode, *, is_forced: bool
    ) -> None:
        """Raise `PauseConflict` if a request cannot be kept as `mode` says."""
        scheduler, pauses = self._core.scheduler, self._controller.pauses
        if mode is PauseMode.ABORT:
            return
        if pauses.mode is PauseMode.WAIT and SchedulerState.of(scheduler).is_busy():
            raise PauseConflict(
                "requests run to their end in a pause of mode 'wait', or for a commit. "
                f"Mode '{mode.value}' would stop them before; call again when they are "
                "done"
            )
        if KV_CACHE in parts:
            if mode is PauseMode.IN_PLACE and scheduler.running:
                together = (
                    "; this engine releases its weights only together with the KV cache"
                    if is_forced
                    else ""
                )
                raise PauseConflict(
                    f"{len(scheduler.running)} requests stay in place and hold KV, "
                    "which is lost when the KV cache is released; use mode 'retract', "
                    f"which computes it again{together}"
                )
            self._check_kv(scheduler)
        if mode is PauseMode.RETRACT:
            request_checks.check_mode(
                scheduler, mode, in_process=self._controller.in_process
            )

    def _drop_caches(self) -> None:
        try:
            # The media caches stay. A front end sends an item that it has cached by
            # its name alone, and a request may have arrived meanwhile.
            pause.flush(self._core, media=False)
        except PauseConflict as error:
            raise PauseConflict(
                "the KV cache was not released, because its blocks are still in use "
                f"({error.message}); call again"
            ) from error

    def _check_kv(self, scheduler: upstream.Scheduler) -> None:
        if held := request_checks.holders(scheduler, is_later=True):
            raise PauseConflict(
                f"the KV cache cannot be released while {held} hold blocks of it; wait "
                "for them, or use mode 'abort'"
            )

    def _not_released(self, parts: set[str], before: upstream.PauseState) -> None:
        """Restore the pause state of before a release that has failed, if possible."""
        sleeping = self._core.model_executor.sleeping_tags
        if sleeping & parts == {KV_CACHE}:
            # Some ranks may have released theirs. Its contents were dropped before.
            self._core.model_executor.wake_up([KV_CACHE])
            self._controller.outside_writes.acknowledge_sleep()
        if sleeping:
            return
        if before == upstream.PauseState.UNPAUSED:
            self._go_on()
        else:
            self._core.scheduler.set_pause_state(before)
            self._tell_awake()

    def _wake_later(self, woken: Future[bool], wake: Callable[[], bool]) -> None:
        try:
            woken.set_result(self.wake(wake))
        except Exception as error:
            woken.set_exception(error)

    def filled(self) -> None:
        """Continue decoding, because an update has filled all lost weights."""
        if self._lost is not None:
            self._lost = None
            self._controller.live_version.forget_before()
            self._go_on()

    def follow(
        self, name: str, asleep: set[str], woken: set[str], lost: set[str]
    ) -> None:
        """Record a sleep that a call on the workers has begun or ended by itself.

        A worker extension may put its own worker to sleep, or give back the memory of
        upstream's pools. It has the effect of upstream's sleep, but requests are kept.
        Those whose KV is lost are retracted; one that cannot be retracted is aborted.

        Args:
            name: of the call.
            asleep: the parts of the memory that sleep now, on one rank or on more.
            woken: the parts that one rank or more have woken up since the last call.
            lost: the parts whose content was given up since then.

        """
        tags = self._core.model_executor.sleeping_tags
        fell, woke = asleep - tags, (woken & tags) - asleep
        napped = woken - tags  # and maybe asleep again
        if not (fell or woke or napped or lost):
            return
        if fell and not tags and self.may_decode and not self._controller.pauses.asked:
            self._paused_before = self._core.scheduler.pause_state
        if WEIGHTS in fell | lost | napped:
            self._controller.outside_writes.abort(f"{name} gave the weights back")
            self._controller.updates.end(
                EngineAsleep(f"{name} put the weights of the workers to sleep")
            )
            self._controller.live_version.forget_before()
        tags |= fell
        tags -= woke
        if "is_sleeping" in vars(self._core.model_executor):  # before 0.31
            vars(self._core.model_executor)["is_sleeping"] = bool(tags)
        logger.warning(
            "%s gave memory back on the workers or got it again; asleep: %s, lost: %s",
            name,
            ", ".join(sorted(tags)) or "nothing",
            ", ".join(sorted(lost)) or "nothing",
        )
        if WEIGHTS in lost and self._controller.ranks.reason is None:
            self._controller.live_version.lose()
            self.lose(f"{name} has given the weights up")
        elif WEIGHTS in lost:  # upstream refills them, without a report of it
            self._controller.live_version.reset()
        if WEIGHTS in woke:
            self._controller.outside_writes.take_back_fill()
        if tags:
            self._core.scheduler.set_pause_state(upstream.PauseState.PAUSED_ALL)
            if self._controller.dp_commit.is_kept and self._core.engines_running:
                logger.error(
                    "other data-parallel engines wait for this one, which sleeps; call "
                    "pause_generation before %s",
                    name,
                )
        if KV_CACHE in lost:
            self._drop_lost_kv(name)
        if not tags and (fell or woke):
            self._go_on()
        self._tell_awake()

    def _drop_lost_kv(self, name: str) -> None:
        """Let no request read KV whose memory was given back."""
        pauses, scheduler = self._controller.pauses, self._core.scheduler
        try:
            pauses.retract_or_abort(f"{name} has given back the KV")
            pauses.note_retracted()
        except Exception as refusal:
            # It is too late to reject the call.
            logger.error("requests may use KV that %s has lost: %s", name, refusal)
        # A block that something holds keeps the flush from all others. So each block is
        # only taken out of the prefix cache.
        manager = scheduler.kv_cache_manager
        manager.evict_blocks({block.block_id for block in manager.block_pool.blocks})
        try:
            pause.flush(self._core, media=False)
        except PauseConflict as refusal:
            logger.error(
                "what a KV connector is sending or keeps may be KV that %s has lost: "
                "%s",
                name,
                refusal,
            )

    def _tell_awake(self) -> None:
        """Let a scrub begin that a sleep has put off, if all memory is there."""
        if self.may_decode:
            self._controller.scrubs.woken()

    def _go_on(self) -> None:
        """Continue decoding, unless weights are missing or a pause is in force."""
        self._tell_awake()
        if self._hold():
            return
        before, self._paused_before = self._paused_before, upstream.PauseState.UNPAUSED
        is_resumed = self._core.scheduler.pause_state == upstream.PauseState.UNPAUSED
        if before != upstream.PauseState.UNPAUSED and not is_resumed:
            self._core.scheduler.set_pause_state(before)
        elif self.may_go_on():
            self._controller.dp_commit.resume()
            self._controller.wake()

    def _note_kept(self, mode: str) -> None:
        if mode == "keep":
            self._controller.pauses.note_retracted()

    def _slept(self, level: int, error: BaseException | None) -> None:
        self._level_under_way, self._under_way = 0, None
        self._controller.outside_writes.acknowledge_sleep()
        if error is not None and WEIGHTS not in self._core.model_executor.sleeping_tags:
            # The call failed before any rank began to sleep.
            self._controller.ranks.prepare_sleep(0)
            self._tell_awake()
            return
        self._controller.live_version.forget_before()
        config = self._core.vllm_config.model_config
        # Upstream refills an engine that cannot be updated, without a report of it.
        if (
            level > 1
            and config.enable_sleep_mode
            and self._controller.ranks.reason is None
        ):
            self._lost = GIVEN_UP
            self._controller.live_version.lose()

    def _hold(self) -> bool:
        """Stop the scheduler if weights are missing or a pause is in force."""
        is_missing = self.weights in ("gone", "loading")
        if not self._core.model_executor.is_sleeping and is_missing:
            self._core.scheduler.set_pause_state(upstream.PauseState.PAUSED_ALL)
            return True
        return bool(self._controller.pauses.hold())
