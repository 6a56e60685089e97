"""Sleep: what of an engine's memory has been given back, and what that rules out.

| weights  | since                      | updates | decoding                         |
|----------|----------------------------|---------|----------------------------------|
| `live`   |                            | yes     | once the KV cache is awake, too  |
| `asleep` | a sleep of level 1 or 2    | refused | no                               |
| `gone`   | waking from one of level 2 | whole   | from the next commit on          |

Upstream puts the engine to sleep and wakes it up; this says who may do what meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.commit import overwrite
from vllm.inflight.engine import asked, connectors, media
from vllm.inflight.errors import EngineAsleep, EngineFault, UpdateBusy
from vllm.inflight.stage import stager

logger = upstream.init_logger(__name__)

WEIGHTS = "weights"
"""Upstream's name of this part of the memory."""

FILLING = ("begin", "receive", "seal", "commit", "rollback", "undo", "unused")
READING = ("checksums", "rows", "rename", "verify")
"""Control calls that put weights into the memory, and that read or name those there."""

WORKER_FILLING = ("reload_weights", "reset_weights")
WORKER_READING = (
    "compute_weight_checksums",
    "save_sharded_state",
    "save_tensorized_model",
)
"""Upstream's calls of workers that do."""


class Sleep:
    """The sleep of one engine core, whoever asked for it."""

    def __init__(self, core: Any, gate: Any) -> None:
        self._core = core
        self._gate = gate
        self._falling = 0
        """The level, from the call on until memory is given back; requests may run."""
        self._fall: Future[Any] | None = None
        """What tells that it has been given back, if requests have to end first."""
        self._is_lost = False
        """Whether what the weights' memory held is lost, and not replaced yet."""
        self.is_dozing = False
        """From a sleep of level 0 on, which gives nothing back, until it is ended."""

    @property
    def weights(self) -> str:
        """`live`, `asleep` or `gone`."""
        if self._falling or WEIGHTS in self._core.model_executor.sleeping_tags:
            return "asleep"
        return "gone" if self._is_lost else "live"

    @property
    def may_decode(self) -> bool:
        """Whether everything is there that a step needs."""
        return self.weights == "live" and not self._core.model_executor.is_sleeping

    def may_go_on(self, is_asked: bool = False) -> bool:
        """Whether decoding goes on: of itself where it does not doze, or on demand."""
        return self.may_decode and (is_asked or not self.is_dozing)

    def check(self, method: str, body: dict[str, Any]) -> None:
        """Raise `EngineAsleep` if a control call needs what is not there."""
        if method == "resume" and not self.may_decode:
            raise EngineAsleep(
                f"the engine is asleep (weights: {self.weights}); decoding goes on "
                "when all of it has been woken up and there are weights"
            )
        if method in FILLING:
            manifest = body.get("manifest")
            # One that is no object is refused as what it is, awake or asleep.
            is_part = isinstance(manifest, dict) and manifest.get("subset")
            self.check_weights(is_whole=not is_part)
        elif method in READING:
            self.check_weights(is_whole=False)

    def check_weights(self, *, is_whole: bool) -> None:
        """Raise `EngineAsleep` unless there are weights, or all of them come."""
        if self.weights == "asleep":
            raise EngineAsleep("the weights of this engine are asleep")
        if self.weights == "gone" and not is_whole:
            raise EngineAsleep(
                "a sleep of level 2 has given the weights up, or a call that failed "
                "has left them half written, so there are none to read, to name or to "
                "leave in place; publish a whole version first"
            )

    def call_workers(self, method: Any, call: Callable[[], Any]) -> Any:
        """`call` the workers for one of upstream's clients, if there is what it needs.

        Where weights are gone, a call of the user's own is taken for what fills them:
        nobody here can tell, and whoever sleeps at level 2 has some way to do it.
        """
        if method in WORKER_FILLING:
            self.check_weights(is_whole=method == "reload_weights")
            if self._gate.in_process:
                return self._gate.turns.run(lambda: self._overwrite(method, call))
            return self._overwrite(method, call)
        if method in WORKER_READING:
            self.check_weights(is_whole=False)
        replies = call()
        if self.weights == "gone" and self._is_own(method):
            self._gate.served.replaced()
            self.filled()
        return replies

    def _overwrite(self, method: str, call: Callable[[], Any]) -> Any:
        """`call` what writes into live weights: a commit of what nobody knows.

        Raises:
            Conflict: something is under way that a commit or an update has to wait for.
            Exception: the call has failed. Where it had written, nothing is decoded
                until there are whole weights again.

        """
        gate, scheduler = self._gate, self._core.scheduler
        try:
            gate.may_begin({})
            gate.updates.require_connected()
        except UpdateBusy as error:
            raise UpdateBusy(
                f"{method} writes into the weights that are served, which has to wait: "
                f"{error.message}. update_weights_from_disk loads files beside them"
            ) from error
        connectors.check(scheduler)
        mode = asked.mode({}, connectors.default_mode(scheduler))
        gate.pauses.check_commit(mode)
        media.check(scheduler)
        self._core.model_executor.collective_rpc(stager.let_go)
        gate.ranks.wait_for_steps(self._core.batch_queue)
        connectors.drop(scheduler, self._core.batch_queue)
        try:
            replies = call()
        except BaseException as error:
            if self._overwritten(has_failed=True) and isinstance(error, Exception):
                raise EngineFault(
                    f"{method} has failed and left the weights half written "
                    f"({type(error).__name__}: {error}); decoding goes on when a "
                    "whole version has been published"
                ) from error
            raise
        self._overwritten(has_failed=False)
        gate.pauses.treat(mode)
        return replies

    def _overwritten(self, *, has_failed: bool) -> bool:
        """Claim no version for what is there now; whether nobody may decode with it.

        A call that has failed before its first write has changed nothing.
        """
        on_ranks = self._core.model_executor.collective_rpc
        if has_failed and all(on_ranks(overwrite.put_back)):
            return False
        on_ranks(overwrite.overwritten)
        self._gate.served.replaced()
        self._gate.served.forget_before()
        if has_failed and self._gate.ranks.reason is None:
            self._is_lost = True
            self._hold()
        media.see_again(self._core)
        if not has_failed:
            self.filled()
        return self._is_lost

    def _is_own(self, method: Any) -> bool:
        """Whether a call of the workers is the user's, and not upstream's or ours."""
        if not isinstance(method, str):
            return True
        # The worker's class tells nothing: with one rank it has what the extension has.
        name = self._core.vllm_config.parallel_config.worker_extension_cls
        return bool(name) and hasattr(upstream.resolve_obj_by_qualname(name), method)

    def fall(self, level: int, fall: Callable[[int], Any]) -> Any:
        """Fall asleep by `fall`, when no rank is at work on a second set any more.

        One that comes while another still waits for requests treats them as it says,
        and is of the level that the ranks were prepared for.

        Raises:
            EngineFault: a transfer does not let go, or a host lacks memory for what
                is to be kept; only the update that was under way has ended.

        """
        if level < 1:
            answer = fall(level)
            self.is_dozing = True
            return answer
        if self.weights == "asleep":
            return fall(self._falling or level)
        self._falling = level
        try:
            self._gate.updates.end(EngineAsleep("the engine was put to sleep"))
            self._gate.ranks.drowse(level)
            answer = fall(level)
        except BaseException as error:
            self._fell(level, error)
            raise
        if isinstance(answer, Future):
            self._fall = answer
            answer.add_done_callback(lambda done: self._fell(level, done.exception()))
        else:
            self._fell(level, None)
        return answer

    def wake(self, wake: Callable[[], bool]) -> Any:
        """Wake up by `wake`; a pause that somebody else began goes on.

        While a sleep waits for requests, a Future of that: else memory would be given
        back after it, under an engine that decodes.
        """
        if self._fall is not None:
            woken: Future[bool] = Future()
            self._fall.add_done_callback(lambda _: self._wake_later(woken, wake))
            return woken
        lockstep = self._gate.lockstep
        stood_still = lockstep.is_kept and not self._core.engines_running
        is_awake = wake()
        if is_awake:
            self.is_dozing = False
            is_held = self._hold()
            if stood_still:
                lockstep.settle(is_held)
            self._gate.rouse()
            if self.weights == "gone":
                logger.warning(
                    "awake, without weights: a sleep of level 2 has given them up; "
                    "decoding goes on when an update has been committed"
                )
        return is_awake

    def _wake_later(self, woken: Future[bool], wake: Callable[[], bool]) -> None:
        try:
            woken.set_result(self.wake(wake))
        except Exception as error:
            woken.set_exception(error)

    def filled(self) -> None:
        """Weights have come in the place of those that were given up."""
        if self._is_lost:
            self._is_lost = False
            self._gate.served.forget_before()
            if not self._hold() and self.may_go_on():
                self._gate.lockstep.resume()
                self._gate.rouse()

    def _fell(self, level: int, error: BaseException | None) -> None:
        self._falling, self._fall = 0, None
        if error is not None and WEIGHTS not in self._core.model_executor.sleeping_tags:
            self._gate.ranks.drowse(0)  # it failed before any rank was told
            return
        self._gate.served.forget_before()
        config = self._core.vllm_config.model_config
        # Who cannot be updated is upstream's to fill again, and to trust that it was.
        if level > 1 and config.enable_sleep_mode and self._gate.ranks.reason is None:
            self._is_lost = True
            self._gate.served.lose()

    def _hold(self) -> bool:
        """Have the scheduler stand still if something is missing, or somebody asked."""
        if not self._core.model_executor.is_sleeping and self.weights == "gone":
            self._core.scheduler.set_pause_state(upstream.PauseState.PAUSED_ALL)
            return True
        return bool(self._gate.pauses.hold())
