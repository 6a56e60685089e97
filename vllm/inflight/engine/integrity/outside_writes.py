"""What others write into the weights that are served, past any update.

An update is staged beside what is served. Four kinds of calls write into live weights
instead, and this engine core is told of them by its ranks
(worker/integrity/tripwire.py):

| who writes | when it is looked for |
|---|---|
| upstream's `reload_weights`, `reset_weights` | they are carried out here |
| any other call of the workers that is not known to be harmless | before and after it |
| Python code beside an engine in its caller's process | before the next step |
| a thread of a worker, or a call past the engine core | before the next step |

What was written is a version of its own, with a label of its own and no digest: its KV
has a root of its own, nothing returns to what was there before, and the next subset
copies all that it does not replace. A call that fails when it has written leaves
nothing to decode with. A reload that a call begins and does not end holds decoding
until a later call ends it, or its deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.pause.lease import Lease
from vllm.inflight.engine.scheduling import encoder_cache, kv_connectors
from vllm.inflight.errors import (
    Conflict,
    EngineFault,
    PauseConflict,
    UpdateBusy,
)
from vllm.inflight.update import PauseMode

logger = upstream.init_logger(__name__)

FILLING = ("reload_weights", "reset_weights")
"""Upstream's calls of the workers that write into live weights."""

READING = (
    "compute_weight_checksums",
    "save_sharded_state",
    "save_tensorized_model",
)
"""Upstream's calls of the workers that read them."""

HARMLESS = frozenset(
    {
        *READING,
        "add_lora",
        "check_health",
        "get_cache_block_size_bytes",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Upstream's calls of the workers that write into no weights; all others are watched.

That costs a sample of the weights before and after the call.
"""

OURS = "inflight_"
"""How the names of our own calls of the workers begin."""

BESIDE = "code beside the engine"
"""What is called a write that no call of the workers has made."""

PATIENCE_S = 10.0
"""How long ranks are waited for whose call was given up by whoever made it."""

QUIET_S = 5.0
"""Writes that follow each other faster, by calls of one name, are logged once."""


class OutsideWrites:
    """Those of one engine core; changed between two steps only."""

    def __init__(self, core: upstream.EngineCore, controller: EngineContext) -> None:
        self._core = core
        self._controller = controller
        self._lease = Lease(
            controller.step_queue.submit, self._expired, "a reload of live weights"
        )
        config = InflightConfig.of(core.vllm_config)
        self._deadline_s = config.update_deadline_s
        self._thread: int | None = None
        """Of the caller's process, that has begun the reload under way."""
        self._found: list[dict[str, Any]] = []
        """What the ranks reported last."""
        self._is_torn = False
        """Whether layers may have no memory, as they could not be put back."""
        self._is_closed = False
        """Whether the weights' memory is given back, and may be another engine's."""
        self._was_idle = True
        """Whether there was no request since the last step with one."""
        self._told = ("", -QUIET_S)
        """Whose write was logged last, and when."""

    # ---------------------------------------------------------------- the calls
    def call(self, method: Any, call: Callable[[], Any]) -> Any:
        """`call` the workers for a client, and see what that writes.

        Args:
            method: its name, or what is to be run on the workers.
            call: makes the call; returns the replies of the ranks.

        Raises:
            Conflict: it needs weights that are not there, or writes into those that an
                update is about to replace.
            EngineFault: upstream's reload has failed and has left half of it written.
            Exception: what the call itself raises.

        """
        sleep, turns = self._controller.sleep, self._controller.step_queue
        if self._is_closed:
            return call()
        if method in FILLING:
            sleep.check_weights(is_whole=method == "reload_weights")
            if self._controller.dp_commit.is_kept:
                return self._reload_together(method, call)
            if self._controller.in_process:
                return turns.run(lambda: self._reload(method, call))
            return self._reload(method, call)
        if method in READING:
            sleep.check_weights(is_whole=False)
        is_named = isinstance(method, str)
        if is_named and (method in HARMLESS or method.startswith(OURS)):
            return call()
        if not self._controller.in_process:
            return self._watched(_name_of(method), call)
        with turns.between():
            return self._watched(_name_of(method), call)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Around a step: see what was written since the last one.

        What nobody was to end any more is put back. Python code beside an engine in its
        caller's process may have done anything while there was no request.
        """
        if self._core.scheduler.requests and not self._is_closed:
            was_idle, self._was_idle = self._was_idle, False
            try:
                self._look_before_step(was_idle)
            except Exception as error:  # of a look, which a step may not fail with
                self._lose(f"nobody knows what was written ({_told(error)})")
        try:
            yield
        finally:
            self._was_idle |= not self._core.scheduler.requests

    def _look_before_step(self, was_idle: bool) -> None:
        sleep = self._controller.sleep
        self.before_call(is_certain=was_idle)
        if sleep.weights == "loading" and self._is_abandoned():
            self._break_off(self._lease.owner, "the thread that began it decodes")
        if was_idle and sleep.weights != "live":
            logger.warning("a request waits: %s", sleep.detail)

    def before_call(self, *, is_certain: bool) -> None:
        """See what was written by nobody's call, before that can matter.

        Args:
            is_certain: do so without a sign of it, where Python code beside the engine
                could have written unseen.

        """
        if self._is_closed or self._controller.sleep.weights == "asleep":
            return  # there is nothing that could be read
        is_likely = is_certain and self._controller.in_process
        if is_likely or self._controller.ranks.is_touched():
            self._look(BESIDE)

    def abort(self, why: str = "it was aborted") -> bool:
        """End a reload of somebody's that is under way; whether there was one."""
        if self._controller.sleep.weights != "loading":
            return False
        self._break_off(self._lease.owner, why)
        return True

    def heal(self) -> None:
        """Put layers back where that has failed, before other weights come.

        Raises:
            EngineFault: it has failed once more.

        """
        if self._controller.sleep.weights == "gone" and self._is_torn:
            self._controller.ranks.overwrite("put_back")
            self._is_torn = False

    def make_blank(self, *, keeps_some: bool) -> None:
        """Make the weights blank, which are lost; else nobody could tell what comes.

        Args:
            keeps_some: whether upstream has kept some of them over a sleep.

        """
        if self._controller.ranks.reason is not None:
            return  # weights that cannot be updated are upstream's to fill
        try:
            self._controller.ranks.overwrite("make_blank", keeps_some)
            self._found = self._controller.ranks.overwrite("look")
        except Exception:
            self._found = []
            logger.exception(
                "weights that are lost could not be made blank, so that decoding "
                "goes on with a published version only"
            )

    def progress(self) -> str:
        """How much has come of weights that were lost, for the end of a sentence."""
        missing = [r for r in self._found if r["num_missing"]]
        if not missing:
            return ""
        num_missing = sum(r["num_missing"] for r in missing)
        num_required = sum(r["num_required"] for r in self._found)
        named = ", ".join(missing[0]["missing"])
        return (
            f": {num_required - num_missing} of {num_required} parameters have been "
            f"written since, and not yet {named}"
            + (", …" if num_missing > len(missing[0]["missing"]) else "")
        )

    def close(self) -> None:
        """No deadline outlives its engine, and nobody looks at its weights any more."""
        self._is_closed = True
        self._lease.drop()

    # --------------------------------------------------------- calls of others
    def _watched(self, name: str, call: Callable[[], Any]) -> Any:
        ranks = self._controller.ranks
        ranks.wait_for_steps(self._core.batch_queue)
        try:
            ranks.overwrite("arm")
        except Exception:
            # It sees less then: what is handed to `load_weights`, and reloads.
            logger.exception("the weights could not be sampled before %s", name)
        try:
            replies = call()
        except BaseException as error:
            self._look(name, error)
            raise
        self._look(name)
        return replies

    def _look(self, name: str, error: BaseException | None = None) -> None:
        """See what `name` has written, now that it is over, and act on it."""
        self._controller.ranks.untouch()
        given_up = isinstance(error, TimeoutError)
        try:
            found = self._controller.ranks.overwrite(
                "look", timeout=PATIENCE_S if given_up else None
            )
            self._found = found
        except Exception as fault:
            self._lose(f"nobody knows what {name} has written ({_told(fault)})")
            self._renew(name)
            return
        self._note_displaced(name)
        is_loading = any(report["is_loading"] for report in found)
        if is_loading and error is not None:
            self._break_off(name, f"it has failed ({_told(error)})")
        elif is_loading and not self._is_torn:
            self._keep_open(name)
        elif not is_loading:
            self._is_torn = False
            self._lease.drop()
            try:
                if any(report["is_written"] for report in found):
                    self._written(name, error)
            finally:
                self._controller.sleep.end_load()

    def _written(self, name: str, error: BaseException | None) -> None:
        """What is served now is a version of its own, if it is one at all."""
        sleep, was_lost = self._controller.sleep, self._controller.sleep.is_lost
        if error is not None and not was_lost:
            # First: whatever fails from here on, nothing decodes.
            self._lose(
                f"{name} has failed and left the weights half written ({_told(error)})"
            )
        if was_lost and (error is not None or self._num_missing() != 0):
            self._acknowledge(name)
            self._tell(name, "weights come%s", self.progress())
            return
        self._renew(name)
        if error is not None:
            self.make_blank(keeps_some=False)
            return
        sleep.filled()
        version = self._controller.version
        self._tell(
            name,
            "has written into the weights that are served: they are %r (epoch %d) from "
            "here on, without a digest, and nothing returns to those before",
            version.label,
            version.epoch,
        )

    def _note_displaced(self, name: str) -> None:
        """Refuse updates from here on if parameters do not lie where they would go."""
        displaced = [each for report in self._found for each in report["displaced"]]
        if displaced and self._controller.ranks.reason is None:
            reason = (
                f"{name} has put {displaced[0]} elsewhere, in another shape or dtype; "
                "restart the engine"
            )
            self._controller.ranks.reason = reason
            logger.error(
                "weights of this engine cannot be updated in flight any more: %s",
                reason,
            )

    def _num_missing(self) -> int | None:
        """Parameters of lost weights that have not come; None if nobody can tell.

        Weights that cannot be updated are taken for whole once they are written.
        """
        if self._controller.ranks.reason is not None:
            return 0
        if not all(report["num_required"] for report in self._found):
            return None
        return sum(report["num_missing"] for report in self._found)

    def _renew(self, name: str) -> None:
        """Claim no version for the live weights, and drop the rollback target."""
        controller, core = self._controller, self._core
        controller.live_version.reset()
        controller.live_version.forget_before()
        controller.updates.end(
            UpdateBusy(
                f"{name} has written into the weights that are served, on which the "
                "update was to follow; begin it again"
            )
        )
        self._acknowledge(name)
        if controller.dp_commit.is_kept and core.engines_running:
            logger.warning(
                "%s has written while engines that step together step: some steps may "
                "mix two versions; call pause_generation before such a call",
                name,
            )
        try:
            mode = PauseMode(kv_connectors.default_mode(core.scheduler))
            kv_connectors.drop(core.scheduler, core.batch_queue)
            controller.pauses.check_commit(mode)
            encoder_cache.check_retractable(core.scheduler)
            encoder_cache.see_again(core)
            controller.pauses.treat(mode)
        except Exception as refusal:
            # It is too late to refuse the write.
            logger.error("requests may go on with KV of other weights: %s", refusal)

    def _acknowledge(self, name: str) -> None:
        """Have the ranks forget what they knew of what they serve."""
        try:
            self._controller.ranks.overwrite("let_go")
        except Exception as fault:  # a transfer of the update that was ended above
            logger.warning("%s", fault)
        try:
            self._controller.ranks.overwrite("overwritten")
        except Exception as fault:
            # What a rank does not forget, it would carry into the next subset.
            self._lose(
                f"{name} has written, and a rank failed over it ({_told(fault)})"
            )

    def _lose(self, why: str) -> None:
        self._found = []
        self._controller.sleep.lose(why)
        logger.error("%s", self._controller.sleep.detail)

    # ------------------------------------------------- a reload in several calls
    def _keep_open(self, name: str) -> None:
        """Hold decoding while layers have no memory; later calls may end that."""
        controller = self._controller
        if controller.dp_commit.is_kept and self._core.engines_running:
            # The other engines would wait for a step of this one, and it has none.
            why = (
                "engines that step together step, and would wait for this one; call "
                "pause_generation first"
            )
            self._break_off(name, why)
            if name == BESIDE:
                return  # nobody has called
            raise PauseConflict(f"{name} has begun a reload of live weights: {why}")
        if controller.sleep.weights != "loading":
            controller.updates.end(
                UpdateBusy(f"{name} has begun a reload of live weights")
            )
            logger.info(
                "%s has begun a reload of the weights that are served: decoding stands "
                "still until it has ended",
                name,
            )
            self._thread = self._thread_of(name)
            controller.sleep.begin_load(name)
        self._lease.take(controller.sleep.loading, self._deadline_s)

    def _thread_of(self, name: str) -> int | None:
        """The thread of this process that is to end the reload; None if none is."""
        if not self._controller.in_process:
            return None
        if name != BESIDE:
            return threading.get_ident()
        begun = [report["thread"] for report in self._found if report["thread"]]
        own = [thread for process, thread in begun if process == os.getpid()]
        return own[0] if own else None

    def _is_abandoned(self) -> bool:
        """Whether the thread that steps now is the one that was to end the reload."""
        return self._thread == threading.get_ident()

    def _expired(self) -> None:
        self._break_off(self._lease.owner, "its deadline has passed")

    def _break_off(self, name: str | None, why: str) -> None:
        """Put layers back that a reload has taken aside and does not fill.

        Decoding is held until it is known what is there. It stays so if a rank fails to
        put them back, or if the reload had written.
        """
        controller = self._controller
        told = f"the reload of live weights that {name} began was broken off: {why}"
        self._lease.drop()
        self._thread = None
        controller.sleep.begin_load(name or "a call")
        controller.ranks.untouch()
        try:
            self._found = controller.ranks.overwrite("put_back")
        except Exception as fault:
            self._is_torn = True
            self._lose(f"{told}; and layers could not be put back: {_told(fault)}")
            self._renew(str(name))
            return
        if not any(report["is_written"] for report in self._found):
            logger.warning("%s; the weights that are served are unchanged", told)
            controller.sleep.end_load()
            return
        self._lose(f"{told}, and it has left the weights half written")
        self._renew(str(name))
        self.make_blank(keeps_some=False)

    # --------------------------------------------------------- upstream's calls
    def _reload(self, method: str, call: Callable[[], Any]) -> Any:
        """`call` what writes into live weights: a commit of what nobody knows."""
        mode = self._prepare_reload(method)
        replies = self._carry_out_reload(method, call)
        self._controller.pauses.treat(mode)
        return replies

    def _prepare_reload(self, method: str) -> PauseMode:
        """Refuse it as a commit is refused; how requests are treated after it.

        Raises:
            Conflict: something is under way that a commit or an update has to wait for.

        """
        controller, scheduler = self._controller, self._core.scheduler
        try:
            controller.may_start()
            controller.updates.require_connected()
        except UpdateBusy as error:
            raise UpdateBusy(
                f"{method} writes into the weights that are served, which has to wait: "
                f"{error.message}. update_weights_from_disk loads files beside them"
            ) from error
        kv_connectors.check_connectors(scheduler)
        mode = PauseMode.parse(kv_connectors.default_mode(scheduler))
        controller.pauses.check_commit(mode)
        encoder_cache.check_retractable(scheduler)
        controller.ranks.overwrite("let_go")
        controller.ranks.overwrite("arm")
        controller.ranks.wait_for_steps(self._core.batch_queue)
        kv_connectors.drop(scheduler, self._core.batch_queue)
        return mode

    def _carry_out_reload(self, method: str, call: Callable[[], Any]) -> Any:
        was_lost = self._controller.sleep.is_lost
        try:
            replies = call()
        except BaseException as error:
            self._look(method, error)
            is_lost = self._controller.sleep.is_lost and not was_lost
            if is_lost and isinstance(error, Exception):
                raise EngineFault(
                    f"{method} has failed and left the weights half written "
                    f"({_told(error)}); decoding goes on when a whole version has been "
                    "published"
                ) from error
            raise
        self._controller.ranks.untouch()
        self._controller.live_version.reset()
        self._controller.live_version.forget_before()
        if was_lost:
            self._found = self._controller.ranks.overwrite("look")
        self._acknowledge(method)
        encoder_cache.see_again(self._core)
        if was_lost and self._num_missing():
            logger.warning(
                "%s has not brought all: %s", method, self._controller.sleep.detail
            )
        else:
            self._controller.sleep.filled()
        return replies

    def _reload_together(self, method: str, call: Callable[[], Any]) -> Any:
        """The same on every engine that steps together, between the same two steps.

        A step in which one engine has new weights and another has old ones would be of
        no version. If one cannot write, none does; if one has failed to, none decodes.
        """
        outcome: Future[Any] = Future()

        def switch() -> dict[str, Any]:
            try:
                return {"replies": self._reload_in_step(method, call)}
            except Exception as error:
                return {"error": error}  # as it is; the engines have voted on it

        def done(armed: Future[Any]) -> None:
            error = armed.exception() or armed.result().get("error")
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(armed.result()["replies"])

        armed = self._controller.dp_commit.arm(("overwrite", method), switch)
        armed.add_done_callback(done)
        return outcome

    def _reload_in_step(self, method: str, call: Callable[[], Any]) -> Any:
        dp_commit = self._controller.dp_commit
        failure: Exception | None = None
        try:
            mode = self._prepare_reload(method)
        except Exception as error:
            failure = error
        if not dp_commit.all_could(failure is None):
            raise failure or Conflict(
                f"another engine that steps with this one refuses {method}; nothing "
                "was written"
            )
        try:
            replies = self._carry_out_reload(method, call)
        except Exception as error:
            failure = error
        if dp_commit.all_could(failure is None):
            self._controller.pauses.treat(mode)
            return replies
        if not self._controller.sleep.is_lost:
            self._lose(f"{method} has failed on an engine that steps with others")
            self.make_blank(keeps_some=False)
        raise failure or EngineFault(
            f"{method} has failed on another engine that steps with this one; decoding "
            "goes on when a whole version has been published"
        )

    # ----------------------------------------------------------------- helpers
    def _tell(self, name: str, text: str, *facts: object) -> None:
        """Log what a call has written, once for calls that follow each other."""
        now, (last, when) = time.monotonic(), self._told
        level = logger.debug if last == name and now - when < QUIET_S else logger.info
        level(f"%s: {text}", name, *facts)
        self._told = name, now


def _name_of(method: object) -> str:
    """What a call of the workers is called in messages."""
    if isinstance(method, str):
        return method
    return str(getattr(method, "__qualname__", type(method).__name__))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
