"""Sleep: what of an engine's weights is not there, and what that rules out.

| weights   | since                                   | updates | decoding            |
|-----------|-----------------------------------------|---------|---------------------|
| `live`    |                                         | yes     | once KV is awake too|
| `asleep`  | a sleep of level 1 or 2                 | refused | no                  |
| `gone`    | waking from level 2, or a call of       | whole   | once whole weights  |
|           | somebody's that broke off as it wrote   |         | have come           |
| `loading` | a call of somebody's began a reload and | refused | once that reload    |
|           | has not ended it                        |         | has ended           |

Upstream puts the engine to sleep and wakes it up; this says who may do what meanwhile.
What writes into weights past any update is outside_writes.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import calls, upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.errors import EngineAsleep, UpdateBusy

logger = upstream.init_logger(__name__)

WEIGHTS = "weights"
"""Upstream's name of this part of the memory."""

FILLING = (
    *(calls.StartUpdate, calls.ReceiveChunk, calls.PrepareUpdate, calls.CommitUpdate),
    *(calls.RollBack, calls.UndoSwitch, calls.FindUnused),
)
READING = (
    *(calls.ReadChecksums, calls.ReadRows, calls.RenameVersion, calls.VerifyWeights),
)
"""Control calls that put weights into the memory, and that read or name those there."""

GIVEN_UP = "a sleep of level 2 has given the weights up"


class Sleep:
    """The sleep of one engine core, whoever asked for it."""

    def __init__(self, core: upstream.EngineCore, controller: EngineContext) -> None:
        self._core = core
        self._controller = controller
        self._level_under_way = 0
        """The level, from the call on until memory is given back; requests may run."""
        self._under_way: Future[Any] | None = None
        """What tells that it has been given back, if requests have to end first."""
        self._lost: str | None = None
        """Why what the weights' memory held is lost; None if it is not, or if other
        weights have come in its place."""
        self._loading: str | None = None
        """What has begun a reload of live weights that has not ended."""
        self.is_paused_by_sleep = False
        """From a sleep of level 0 on, which gives nothing back, until it is ended."""

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
        """Why nothing is decoded with the weights, in a sentence; None if they live."""
        state = self.weights
        if state == "asleep":
            return "the weights of this engine are asleep"
        if state == "loading":
            return (
                f"{self._loading} has begun a reload of the weights that are served "
                "and has not ended it; decoding goes on when it has, and what it has "
                "taken aside is put back by POST /abort_weight_update, or when "
                "--inflight-update-deadline-s has passed since its last call"
            )
        if state == "gone":
            has_come = self._controller.outside_writes.progress()
            return f"{self._lost}; decoding waits for whole weights{has_come}"
        return None

    @property
    def may_decode(self) -> bool:
        """Whether everything is there that a step needs."""
        return self.weights == "live" and not self._core.model_executor.is_sleeping

    def may_go_on(self, is_asked: bool = False) -> bool:
        """Whether decoding goes on: of itself where it does not doze, or on demand."""
        return self.may_decode and (is_asked or not self.is_paused_by_sleep)

    def check(self, call: calls.Call) -> None:
        """Raise if a control call needs what is not there; see `check_weights`."""
        is_resume = isinstance(call, calls.ResumeDecoding)
        if is_resume and self.weights == "loading":
            raise UpdateBusy(str(self.detail))
        if is_resume and not self.may_decode:
            raise EngineAsleep(
                f"the engine is asleep (weights: {self.weights}); decoding goes on "
                "when all of it has been woken up and there are weights"
                + (f": {self.detail}" if self.weights == "gone" else "")
            )
        if isinstance(call, FILLING):
            manifest = call.manifest if isinstance(call, calls.StartUpdate) else None
            # One that is no object is refused as what it is, awake or asleep.
            is_part = isinstance(manifest, dict) and (
                manifest.get("subset") or manifest.get("draft")
            )
            self.check_weights(is_whole=not is_part)
        elif isinstance(call, READING):
            self.check_weights(is_whole=False)

    def check_weights(self, *, is_whole: bool) -> None:
        """Raise unless there are weights, or all of them come.

        Raises:
            EngineAsleep: there are none, and not all come.
            UpdateBusy: a reload of somebody's is under way.

        """
        if self.weights == "loading":
            raise UpdateBusy(str(self.detail))
        if self.weights == "asleep" or (self.weights == "gone" and not is_whole):
            raise EngineAsleep(
                f"{self.detail}; there are none to read, to name or to leave in place"
            )

    def lose(self, why: str) -> None:
        """The weights are of no use any more: nothing decodes until others come.

        Args:
            why: without an end, as it goes into sentences.

        """
        self._lost, self._loading = why, None
        self._hold()

    def begin_load(self, name: str) -> None:
        """A call named `name` has taken layers aside: nothing decodes meanwhile."""
        self._loading = name
        self._hold()

    def end_load(self) -> None:
        """Every layer has its memory again."""
        if self._loading is not None:
            self._loading = None
            self._go_on()

    @property
    def loading(self) -> str | None:
        """What has begun a reload of live weights that has not ended; None if none."""
        return self._loading

    @property
    def is_lost(self) -> bool:
        """Whether the weights are of no use, be they awake or not."""
        return self._lost is not None

    def sleep(self, level: int, sleep: Callable[[int], Any]) -> Any:
        """Put the engine to sleep by `sleep`, once no rank works on its shadow weights.

        One that comes while another still waits for requests treats them as it says,
        and is of the level that the ranks were prepared for.

        Raises:
            EngineFault: a transfer does not let go, or a host lacks memory for what
                is to be kept; only the update that was under way has ended.

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
        """Wake up by `wake`; a pause that somebody else began goes on.

        While a sleep waits for requests, a Future of that: else memory would be given
        back after it, under an engine that decodes.
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
                logger.warning("awake, without weights: %s", self.detail)
        return is_awake

    def _wake_later(self, woken: Future[bool], wake: Callable[[], bool]) -> None:
        try:
            woken.set_result(self.wake(wake))
        except Exception as error:
            woken.set_exception(error)

    def filled(self) -> None:
        """Whole weights have come in the place of those that were lost."""
        if self._lost is not None:
            self._lost = None
            self._controller.live_version.forget_before()
            self._go_on()

    def _go_on(self) -> None:
        """Let decoding go on, unless something else is missing or somebody paused."""
        if not self._hold() and self.may_go_on():
            self._controller.dp_commit.resume()
            self._controller.wake()

    def _slept(self, level: int, error: BaseException | None) -> None:
        self._level_under_way, self._under_way = 0, None
        if error is not None and WEIGHTS not in self._core.model_executor.sleeping_tags:
            self._controller.ranks.prepare_sleep(
                0
            )  # it failed before any rank was told
            return
        self._controller.live_version.forget_before()
        config = self._core.vllm_config.model_config
        # Who cannot be updated is upstream's to fill again, and to trust that it was.
        if (
            level > 1
            and config.enable_sleep_mode
            and self._controller.ranks.reason is None
        ):
            self._lost = GIVEN_UP
            self._controller.live_version.lose()

    def _hold(self) -> bool:
        """Have the scheduler stand still if something is missing, or somebody asked."""
        is_missing = self.weights in ("gone", "loading")
        if not self._core.model_executor.is_sleeping and is_missing:
            self._core.scheduler.set_pause_state(upstream.PauseState.PAUSED_ALL)
            return True
        return bool(self._controller.pauses.hold())
