"""Out-of-band writes: writes into live weights outside of any update.

An update is loaded into the shadow weights. Four kinds of code write into live weights
instead. The ranks report such writes to the engine core (worker/integrity/tripwire.py):

| who writes | when the engine core checks |
|---|---|
| upstream's `reload_weights`, `reset_weights` | they are executed here |
| any other worker call that is not known to be harmless | before and after the call |
| Python code beside an engine in its caller's process | before the next step |
| a thread of a worker, or a call that avoids the engine core | before the next step |

The written weights become a version with its own label and no digest. Its KV has its
own prefix-cache namespace, and the rollback target is dropped. The next subset copies
all weights that it does not replace.

A call that fails after it has written leaves no weights to decode with. A reload that
spans several calls stops decoding until a call ends it, or until its deadline.
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
from vllm.inflight.engine.pause.abort import abort_stuck
from vllm.inflight.engine.pause.absorption import Need
from vllm.inflight.engine.pause.lease import Lease
from vllm.inflight.engine.scheduling import encoder_cache, kv_connectors
from vllm.inflight.errors import (
    Conflict,
    EngineFault,
    PauseConflict,
    UpdateBusy,
)
from vllm.inflight.frameworks.known_call import UNKNOWN, KnownWrite
from vllm.inflight.update import WEIGHTS, PauseMode

logger = upstream.init_logger(__name__)

FILLING = ("reload_weights", "reset_weights")
"""Upstream's worker calls that write into live weights."""

READING = (
    "compute_weight_checksums",
    "save_sharded_state",
    "save_tensorized_model",
)
"""Upstream's worker calls that read live weights."""

HARMLESS = frozenset(
    {
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
"""Upstream's worker calls that neither read nor write weights. All calls but these and
`READING` are watched.

Watching a call costs a sample of the weights before and after it.
"""

OURS = "inflight_"
"""The prefix of our own worker calls."""

BESIDE = "code beside the engine"
"""The name, in messages, of a write that no worker call has made."""

PATIENCE_S = 10.0
"""Longest wait for the ranks after a client has given up its call."""

QUIET_S = 5.0
"""Writes by calls of one name are logged once while they follow each other faster."""


class OutsideWrites:
    """The out-of-band writes of one engine core; changed between two steps only."""

    def __init__(self, core: upstream.EngineCore, controller: EngineContext) -> None:
        self._core = core
        self._controller = controller
        self._lease = Lease(
            controller.step_queue.submit, self._expired, "a reload of live weights"
        )
        config = InflightConfig.of(core.vllm_config)
        self._deadline_s = config.update_deadline_s
        self._fills_in_place = controller.ranks.has_logs
        """Whether updates write lost weights where they are served."""
        self._thread: int | None = None
        """The thread of the caller's process that has begun the open reload."""
        self._found: list[dict[str, Any]] = []
        """The last reports of the ranks."""
        self._is_torn = False
        """Whether layers may have no memory, because restoring them failed."""
        self._is_closed = False
        """Whether the weights' memory is freed, so that another engine may own it."""
        self._was_idle = True
        """Whether the engine had no request at some time since its last step."""
        self._last_logged = ("", -QUIET_S)
        """The call whose write was logged last, and when."""

    # ---------------------------------------------------------------- the calls
    def call(
        self, method: Any, call: Callable[[], Any], known: KnownWrite = UNKNOWN
    ) -> Any:
        """Make a client's worker call, and detect writes into live weights.

        Args:
            method: the name of the worker method, or the function to run on workers.
            call: makes the call; returns the replies of the ranks.
            known: what is known of the call.

        Raises:
            Conflict: the call needs weights that are missing, or writes into weights
                while an update is under way.
            EngineFault: upstream's reload failed and left the weights half written.
            Exception: any error of the call itself.

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
        if method in READING or is_harmless(method):
            return call()
        if not self._controller.in_process:
            return self._watched(_name_of(method), call, known)
        with turns.between():
            return self._watched(_name_of(method), call, known)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Before a step, detect writes since the last step.

        A reload that its thread has abandoned is undone. Python code beside an engine
        in its caller's process may write at any time while there is no request.
        """
        if self._core.scheduler.requests and not self._is_closed:
            was_idle, self._was_idle = self._was_idle, False
            try:
                self._look_before_step(was_idle)
            except Exception as error:  # a failed check must not fail the step
                self._lose(
                    f"checking for out-of-band writes failed ({_text(error)}), so the "
                    "weights are unknown"
                )
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
        """Detect writes that no worker call has made, before they take effect.

        Args:
            is_certain: check without a sign of a write, if Python code beside the
                engine could have written undetected.

        """
        if self._is_closed:
            return
        # While the weights sleep, there are none to read.
        is_awake = self._controller.sleep.weights != "asleep"
        is_likely = is_certain and is_awake and self._controller.in_process
        if is_likely or self._controller.ranks.is_touched():
            self._look(BESIDE)

    def abort(self, why: str = "it was aborted") -> bool:
        """End an open out-of-band reload; returns whether there was one."""
        if self._controller.sleep.weights != "loading":
            return False
        self._break_off(self._lease.owner, why)
        return True

    def heal(self) -> None:
        """Restore layers whose restoring failed before, so that weights can be loaded.

        Raises:
            EngineFault: restoring has failed again.

        """
        if self._controller.sleep.weights == "gone" and self._is_torn:
            self._controller.ranks.overwrite("put_back")
            self._is_torn = False

    def make_blank(self, *, keeps_some: bool) -> None:
        """Fill lost weights with a marker, so that later writes can be counted.

        Args:
            keeps_some: whether upstream has kept some of the weights during a sleep.

        """
        if self._controller.ranks.reason is not None:
            return  # upstream fills weights that cannot be updated
        try:
            self._controller.ranks.overwrite("make_blank", keeps_some)
            self._found = self._controller.ranks.overwrite("look")
        except Exception:
            self._found = []
            logger.exception(
                "lost weights could not be marked, so writes into them cannot be "
                "counted; decoding goes on after an update of all tensors"
            )

    def acknowledge_sleep(
        self, woken: list[str] | None = None, lost: list[str] | None = None
    ) -> None:
        """Let the ranks forget what the engine core knows of a sleep.

        Args:
            woken: parts that have woken up; None for all.
            lost: parts whose content was given up; None for all.

        """
        try:
            self._controller.ranks.overwrite("acknowledge_sleep", woken, lost)
        except Exception as fault:  # the sleep counts as one of the workers' own
            logger.warning("a rank failed after it was put to sleep: %s", fault)

    def take_back_fill(self) -> None:
        """Mark lost weights again if an update has filled some of them and ended."""
        if not self._fills_in_place or self._controller.sleep.weights != "gone":
            return
        try:
            self._controller.ranks.overwrite("take_back_fill")
            self._found = self._controller.ranks.overwrite("look")
        except Exception as fault:  # the next update writes over what is left
            logger.warning("lost weights could not be marked again: %s", fault)

    def progress(self) -> str:
        """The end of a message: how many parameters of lost weights were written."""
        missing = [r for r in self._found if r["num_missing"]]
        if not missing:
            return ""
        num_missing = sum(r["num_missing"] for r in missing)
        num_required = sum(r["num_required"] for r in self._found)
        named = ", ".join(missing[0]["missing"])
        return (
            f": {num_required - num_missing} of {num_required} parameters have been "
            f"written since; still missing are {named}"
            + (", …" if num_missing > len(missing[0]["missing"]) else "")
        )

    def close(self) -> None:
        """Stop checking the weights, and end the deadline, at the engine's end."""
        self._is_closed = True
        self._lease.drop()

    # --------------------------------------------------------- calls of others
    def _watched(self, name: str, call: Callable[[], Any], known: KnownWrite) -> Any:
        ranks = self._controller.ranks
        ranks.wait_for_steps(self._core.batch_queue)
        try:
            ranks.overwrite("arm")
        except Exception:
            # The check then detects only `load_weights` and reloads.
            logger.exception("the weights could not be sampled before %s", name)
        try:
            replies = call()
        except BaseException as error:
            self._look(name, error, known)
            raise
        self._look(name, known.failed(replies), known)
        return replies

    def _look(
        self,
        name: str,
        error: BaseException | None = None,
        known: KnownWrite = UNKNOWN,
    ) -> None:
        """Detect what the call `name` has written, after its end, and act on it."""
        self._controller.ranks.untouch()
        given_up = isinstance(error, TimeoutError)
        try:
            found = self._controller.ranks.overwrite(
                "look", timeout=PATIENCE_S if given_up else None
            )
            self._found = found
        except Exception as fault:
            self._lose(
                f"checking what {name} has written failed ({_text(fault)}), so the "
                "weights are unknown"
            )
            self._renew(name)
            return
        self._note_displaced(name)
        self._follow_sleep(name)
        is_asleep = any(WEIGHTS in report["asleep"] for report in found)
        is_loading = any(report["is_loading"] for report in found)
        is_written = any(report["is_written"] for report in found)
        has_written = known.is_certain or (known.is_expected and error is None)
        is_written |= has_written and not is_asleep
        if is_loading and error is not None:
            self._break_off(name, f"it has failed ({_text(error)})")
        elif is_loading and not self._is_torn:
            self._keep_open(name)
        elif not is_loading:
            self._is_torn &= is_asleep  # layers that sleep were not looked at
            self._lease.drop()
            try:
                if is_written:
                    self._written(name, error, known.label)
                    # More writes may follow this one.
                    self._controller.pauses.absorption.enforce(Need.WRITE)
            finally:
                self._controller.sleep.end_load()

    def _written(
        self, name: str, error: BaseException | None, label: str | None
    ) -> None:
        """Make the written weights a new version, or mark them as lost."""
        sleep, was_lost = self._controller.sleep, self._controller.sleep.is_lost
        if error is not None and not was_lost:
            # First, so that nothing decodes if anything below fails.
            self._lose(
                f"{name} has failed and left the weights half written ({_text(error)})"
            )
        if was_lost and (error is not None or self._num_missing() != 0):
            if self._fills_in_place:
                self._controller.updates.end(
                    UpdateBusy(
                        f"{name} has written into the lost weights that the update "
                        "fills in place; start the update again"
                    )
                )
            self._acknowledge(name)
            self._log_write(name, "has written lost weights%s", self.progress())
            return
        self._renew(name, label if error is None else None)
        if error is not None:
            self.make_blank(keeps_some=False)
            return
        sleep.filled()
        version = self._controller.version
        self._log_write(
            name,
            "has written into the live weights. They are version %r (epoch %d) from "
            "now on, without a digest and without a rollback target",
            version.label,
            version.epoch,
        )

    def _follow_sleep(self, name: str) -> None:
        """Act on memory that a call has given back, or got again, on the ranks."""
        asleep, woken, lost = (
            {part for report in self._found for part in report[field]}
            for field in ("asleep", "woken", "lost")
        )
        sleep = self._controller.sleep
        sleep.follow(name, asleep, woken, lost)
        if woken or lost:
            self.acknowledge_sleep(sorted(woken), sorted(lost))
        is_blank = any(report["num_missing"] for report in self._found)
        if is_blank and not sleep.is_lost and self._controller.ranks.reason is None:
            # Nobody has told of the sleep that they were lost in.
            found = self._found
            self._controller.live_version.lose()
            self._lose(f"the weights were given up before {name} ended")
            self._found = found

    def _note_displaced(self, name: str) -> None:
        """Reject further updates if a call has replaced parameters by other tensors."""
        displaced = [each for report in self._found for each in report["displaced"]]
        if displaced and self._controller.ranks.reason is None:
            reason = (
                f"{name} has replaced the tensor of {displaced[0]}, or its shape or "
                "dtype; restart the engine"
            )
            self._controller.ranks.reason = reason
            logger.error(
                "weights of this engine cannot be updated in flight any more: %s",
                reason,
            )

    def _num_missing(self) -> int | None:
        """How many parameters of lost weights are missing; None if that is unknown.

        Weights that cannot be updated count as complete after a write.
        """
        if self._controller.ranks.reason is not None:
            return 0
        if not all(report["num_required"] for report in self._found):
            return None
        return sum(report["num_missing"] for report in self._found)

    def _renew(self, name: str, label: str | None = None) -> None:
        """Claim no version for the live weights, and drop the rollback target."""
        controller, core = self._controller, self._core
        controller.live_version.reset(label)
        controller.live_version.forget_before()
        controller.updates.end(
            UpdateBusy(
                f"{name} has written into the live weights that the update was based "
                "on; start the update again"
            )
        )
        self._acknowledge(name)
        if controller.dp_commit.is_kept and core.engines_running:
            logger.warning(
                "%s has written while engines that step together step: some steps may "
                "mix two versions; call pause_generation before such a call",
                name,
            )
        # It is too late to reject the write. What fails keeps nothing else from it.
        steps = self._compute_again, self._see_again, self._flush, self._drop_stored
        for step in steps:
            try:
                step(f"{name} has written into the live weights")
            except Exception as fault:
                logger.error("requests may use KV of the weights before: %s", fault)

    def _compute_again(self, why: str) -> None:
        """Treat requests as a commit does, but abort those that would reject it."""
        if kv_connectors.default_mode(self._core.scheduler) == PauseMode.RETRACT:
            self._controller.pauses.retract_or_abort(why)

    def _see_again(self, why: str) -> None:
        """Drop the encoder outputs, and treat the requests that read them."""
        controller = self._controller
        stuck = encoder_cache.unretractable(self._core.scheduler)
        controller.counts.treated(abort_stuck(controller, stuck, why))
        encoder_cache.see_again(self._core)

    def _flush(self, why: str) -> None:
        """Flush the prefix cache if an absorbed pause is to do so."""
        self._controller.pauses.treat(PauseMode.IN_PLACE)

    def _drop_stored(self, why: str) -> None:
        """Drop what a connector has stored under keys that know no version."""
        kv_connectors.drop(self._core.scheduler, self._core.batch_queue)

    def _acknowledge(self, name: str) -> None:
        """Make the ranks forget the digests and samples of their live weights."""
        self._controller.counts.outside_writes[name] += 1
        try:
            self._controller.ranks.overwrite("let_go")
        except Exception as fault:  # a transfer of the update that was ended above
            logger.warning("%s", fault)
        try:
            self._controller.ranks.overwrite("overwritten")
        except Exception as fault:
            # Such a rank would copy wrong weights into the next subset.
            self._lose(f"{name} has written, and then a rank failed ({_text(fault)})")

    def _lose(self, why: str) -> None:
        self._found = []
        self._controller.sleep.lose(why)
        logger.error("%s", self._controller.sleep.detail)

    # ------------------------------------------------- a reload in several calls
    def _keep_open(self, name: str) -> None:
        """Stop decoding while layers have no memory, until a later call ends that."""
        controller = self._controller
        if controller.dp_commit.is_kept and self._core.engines_running:
            # The other engines would wait for a step of this one, and it has none.
            why = (
                "other data-parallel engines would wait for this one; call "
                "pause_generation first"
            )
            self._break_off(name, why)
            if name == BESIDE:
                return  # there is no call to answer
            raise PauseConflict(f"{name} has begun a reload of live weights: {why}")
        if controller.sleep.weights != "loading":
            controller.updates.end(
                UpdateBusy(f"{name} has begun a reload of live weights")
            )
            logger.info(
                "%s has begun a reload of the live weights; decoding stops until it "
                "has ended",
                name,
            )
            self._thread = self._thread_of(name)
            controller.sleep.begin_load(name)
        self._lease.take(controller.sleep.loading, self._deadline_s)

    def _thread_of(self, name: str) -> int | None:
        """The thread of this process that should end the reload; None if unknown."""
        if not self._controller.in_process:
            return None
        if name != BESIDE:
            return threading.get_ident()
        begun = [report["thread"] for report in self._found if report["thread"]]
        own = [thread for process, thread in begun if process == os.getpid()]
        return own[0] if own else None

    def _is_abandoned(self) -> bool:
        """Whether the thread that should end the reload runs a step instead."""
        return self._thread == threading.get_ident()

    def _expired(self) -> None:
        self._break_off(self._lease.owner, "its deadline has passed")

    def _break_off(self, name: str | None, why: str) -> None:
        """Restore the layers of a reload that does not end by itself.

        Decoding stops meanwhile. It stays stopped if a rank fails to restore layers, or
        if the reload has written.
        """
        controller = self._controller
        message = f"the reload of live weights that {name} began was ended: {why}"
        self._lease.drop()
        self._thread = None
        controller.sleep.begin_load(name or "a call")
        controller.ranks.untouch()
        try:
            self._found = controller.ranks.overwrite("put_back")
        except Exception as fault:
            self._is_torn = True
            self._lose(f"{message}; restoring the layers failed: {_text(fault)}")
            self._renew(str(name))
            return
        if not any(report["is_written"] for report in self._found):
            logger.warning("%s; the live weights are unchanged", message)
            controller.sleep.end_load()
            return
        self._lose(f"{message}, and it has left the weights half written")
        self._renew(str(name))
        self.make_blank(keeps_some=False)

    # --------------------------------------------------------- upstream's calls
    def _reload(self, method: str, call: Callable[[], Any]) -> Any:
        """Make a call that writes into live weights, under the rules of a commit."""
        mode = self._prepare_reload(method)
        replies = self._carry_out_reload(method, call)
        self._controller.pauses.treat(mode)
        return replies

    def _prepare_reload(self, method: str) -> PauseMode:
        """Check what a commit checks; returns the mode for requests.

        Raises:
            Conflict: another call is under way, and a commit has to wait for it.

        """
        controller, scheduler = self._controller, self._core.scheduler
        try:
            controller.may_start()
            controller.updates.require_connected()
        except UpdateBusy as error:
            raise UpdateBusy(
                f"{method} writes into the live weights, which has to wait: "
                f"{error.message}. update_weights_from_disk does not write into them"
            ) from error
        kv_connectors.check_connectors(scheduler)
        mode = PauseMode.parse(kv_connectors.default_mode(scheduler))
        controller.pauses.check_commit(mode)
        encoder_cache.check_retractable(scheduler)
        controller.ranks.overwrite("let_go")
        self.take_back_fill()
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
                    f"({_text(error)}); decoding goes on after an update of all tensors"
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
                "%s has not filled all weights: %s",
                method,
                self._controller.sleep.detail,
            )
        else:
            self._controller.sleep.filled()
        return replies

    def _reload_together(self, method: str, call: Callable[[], Any]) -> Any:
        """Reload on all engines that step together, between the same two steps.

        Otherwise one step would mix new weights of one engine and old ones of another.
        If one engine cannot write, none does. If a write fails on one, none decodes.
        """
        outcome: Future[Any] = Future()

        def switch() -> dict[str, Any]:
            try:
                return {"replies": self._reload_in_step(method, call)}
            except Exception as error:
                return {"error": error}  # the engines have agreed on the failure

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
                f"another data-parallel engine rejected {method}; nothing was written"
            )
        try:
            replies = self._carry_out_reload(method, call)
        except Exception as error:
            failure = error
        if dp_commit.all_could(failure is None):
            self._controller.pauses.treat(mode)
            return replies
        if not self._controller.sleep.is_lost:
            self._lose(f"{method} has failed on another data-parallel engine")
            self.make_blank(keeps_some=False)
        raise failure or EngineFault(
            f"{method} has failed on another data-parallel engine; decoding goes on "
            "after an update of all tensors"
        )

    # ----------------------------------------------------------------- helpers
    def _log_write(self, name: str, text: str, *facts: object) -> None:
        """Log a write; repeated calls of one name are logged once."""
        now, (last, when) = time.monotonic(), self._last_logged
        level = logger.debug if last == name and now - when < QUIET_S else logger.info
        level(f"%s: {text}", name, *facts)
        self._last_logged = name, now


def is_harmless(method: object) -> bool:
    """Whether a worker call neither reads nor writes weights."""
    is_named = isinstance(method, str)
    return is_named and (method in HARMLESS or str(method).startswith(OURS))


def _name_of(method: object) -> str:
    """The name of a worker call in messages."""
    if isinstance(method, str):
        return method
    return str(getattr(method, "__qualname__", type(method).__name__))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]
