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
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.errors import EngineAsleep, UpdateBusy

logger = upstream.init_logger(__name__)

WEIGHTS = "weights"
"""Upstream's name for the memory of the weights."""

FILLING = ("start", "receive", "prepare", "commit", "rollback", "undo", "unused")
READING = ("checksums", "rows", "rename", "verify")
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

    def check(self, method: str, body: dict[str, Any]) -> None:
        """Raise if a control call needs weights that are missing.

        See `check_weights` for the errors.
        """
        if method == "resume" and self.weights == "loading":
            raise UpdateBusy(str(self.detail))
        if method == "resume" and not self.may_decode:
            raise EngineAsleep(
                f"the engine is asleep (weights: {self.weights}); decoding goes on "
                "when all of it has been woken up and its weights are complete"
                + (f": {self.detail}" if self.weights == "gone" else "")
            )
        if method in FILLING:
            manifest = body.get("manifest")
            # A manifest that is not an object is rejected later, awake or asleep.
            is_part = isinstance(manifest, dict) and (
                manifest.get("subset") or manifest.get("draft")
            )
            self.check_weights(is_whole=not is_part)
        elif method in READING:
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

    def sleep(self, level: int, sleep: Callable[[int], Any]) -> Any:
        """Call `sleep` when no rank works on its shadow weights any more.

        A second call while the first waits for requests keeps the level of the first,
        and treats requests in its own mode.

        Raises:
            EngineFault: a transfer did not stop, or a host lacks memory for the copy.
                The engine stays awake; its update under way has ended.

        """
        if level < 1:
            answer = sleep(level)
            self.is_paused_by_sleep = True
            return answer
        if self.weights == "asleep":
            return sleep(self._level_under_way or level)
        self._controller.outside_writes.abort("the engine was put to sleep")
        self._level_under_way = level
        try:
            self._controller.updates.end(EngineAsleep("the engine was put to sleep"))
            self._controller.ranks.prepare_sleep(level)
            answer = sleep(level)
        except BaseException as error:
            self._slept(level, error)
            raise
        if isinstance(answer, Future):
            self._under_way = answer
            answer.add_done_callback(lambda done: self._slept(level, done.exception()))
        else:
            self._slept(level, None)
        return answer

    def wake(self, wake: Callable[[], bool]) -> Any:
        """Call `wake`. A pause that a pause call began stays in force.

        While a sleep waits for requests, waking waits for it too and returns a Future.
        Otherwise the sleep would release memory of an engine that decodes.
        """
        if self._under_way is not None:
            woken: Future[bool] = Future()
            self._under_way.add_done_callback(lambda _: self._wake_later(woken, wake))
            return woken
        dp_commit = self._controller.dp_commit
        stood_still = dp_commit.is_kept and not self._core.engines_running
        were_asleep = self.weights == "asleep"
        is_awake = wake()
        if were_asleep and self.weights == "gone" and self._lost == GIVEN_UP:
            self._controller.outside_writes.make_blank(keeps_some=True)
        if is_awake:
            self.is_paused_by_sleep = False
            is_held = self._hold()
            if stood_still:
                dp_commit.settle(is_held)
            self._controller.wake()
            if self.weights == "gone":
                logger.warning("the engine is awake without weights: %s", self.detail)
        return is_awake

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

    def _go_on(self) -> None:
        """Continue decoding, unless weights are missing or a pause is in force."""
        if not self._hold() and self.may_go_on():
            self._controller.dp_commit.resume()
            self._controller.wake()

    def _slept(self, level: int, error: BaseException | None) -> None:
        self._level_under_way, self._under_way = 0, None
        if error is not None and WEIGHTS not in self._core.model_executor.sleeping_tags:
            # The call failed before any rank began to sleep.
            self._controller.ranks.prepare_sleep(0)
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
