"""Changes in the engine core: the controller, and the step queue."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.patch.controllers import controller_of, find_controller
from vllm.inflight.patch.records.record import Patch
from vllm.inflight.update import PauseMode


def _controlled(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: upstream.EngineCore, *args: object, **kwargs: object) -> None:
        from vllm.inflight.engine.controller import Controller

        original(self, *args, **kwargs)
        Controller(self).attach(self)

    return __init__


def _controlled_at_last(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_busy_loop(self: upstream.EngineCore) -> Any:
        from vllm.inflight.engine.controller import Controller

        # A spawned process loads its plugins in upstream's constructor, which is the
        # one that runs then. Nothing asks for the controller before this method.
        if Controller.find(self) is None:
            Controller(self).attach(self)
        return original(self)

    return run_busy_loop


def _with_controller(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize_effective_attention_block_size(self: upstream.EngineCore) -> None:
        from vllm.inflight.engine.controller import Controller

        original(self)
        # Called once by the constructor, right after the scheduler is built.
        Controller(self).attach(self)

    return _initialize_effective_attention_block_size


def _keep_stamps(_: Callable[..., Any]) -> Callable[..., Any]:
    def _attach_weight_version(
        self: upstream.EngineCore, outputs: dict[int, Any]
    ) -> None:
        from vllm.inflight.engine.scheduling.version_stamp import Stamp

        # Upstream's method would overwrite the stamp of the step.
        version = controller_of(self).version
        for output in outputs.values():
            if output.weight_version is None:
                output.weight_version = Stamp(version.label, version.epoch).encode()

    return _attach_weight_version


def _close_controller(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: upstream.EngineCore) -> None:
        if (controller := find_controller(self)) is not None:
            controller.close()
        original(self)

    return shutdown


def _drain_step_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    def _handle_client_request(
        self: upstream.EngineCore, request_type: object, request: object
    ) -> None:
        # A call takes as long as a flip does. So the watchdog times each one alone.
        upstream.get_watch_dog().feed()
        controller_of(self).step_queue.drain()
        upstream.get_watch_dog().feed()
        original(self, request_type, request)
        upstream.get_watch_dog().feed()

    return _handle_client_request


def _is_sync_point(core: upstream.EngineCore) -> bool:
    """Whether the engines of a group meet in this step."""
    step: int = core.step_counter
    return step == 1 or not step % core.dp_sync_interval


def _is_32nd_step(core: upstream.EngineCore) -> bool:
    """The same before 0.30, where the interval is a constant of upstream's."""
    return not core.step_counter % 32


def _meet(
    original: Callable[..., Any],
    is_sync_point: Callable[[upstream.EngineCore], bool] = _is_sync_point,
) -> Callable[..., Any]:
    def _has_global_unfinished_reqs(
        self: upstream.EngineCore, local_unfinished: bool
    ) -> Any:
        dp_commit, was_pending = controller_of(self).dp_commit, self.pending_pause
        is_anybody_busy = original(self, local_unfinished)
        if not is_sync_point(self):
            return is_anybody_busy
        if was_pending and not self.pending_pause and dp_commit.have_agreed():
            is_anybody_busy = True
        return dp_commit.meet() or is_anybody_busy

    return _has_global_unfinished_reqs


def _count_pauses(original: Callable[..., Any]) -> Callable[..., Any]:
    def _pause_complete(self: upstream.EngineCore) -> Any:
        if self.pending_pause:
            controller_of(self).dp_commit.num_pauses_left += 1
        return original(self)

    return _pause_complete


def _with_owner(_: Callable[..., Any]) -> Callable[..., Any]:
    def pause_generation(
        self: upstream.EngineCore, mode: str = "abort", clear_cache: bool = True
    ) -> Future[None] | None:
        pauses = controller_of(self).pauses
        # As `AsyncLLM.pause_generation` reads upstream's arguments.
        named = "retract" if mode == "keep" and clear_cache else mode
        answer = pauses.pause(PauseMode.parse(named), flush_cache=clear_cache)
        # Upstream's rule for new requests, until the pause is over.
        self.reject_new_requests = mode != "keep"
        return _without_reply(answer) if isinstance(answer, Future) else None

    return pause_generation


def _without_reply(answer: Future[Any]) -> Future[None]:
    """A Future that is done when `answer` is, or fails as it does."""
    done: Future[None] = Future()

    def tell(finished: Future[Any]) -> None:
        error = finished.exception()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    answer.add_done_callback(tell)
    return done


def _rename(_: Callable[..., Any]) -> Callable[..., Any]:
    def set_weight_version(self: upstream.EngineCore, weight_version: str) -> None:
        from vllm.inflight.calls import RenameVersion
        from vllm.inflight.engine.compat import worker_calls

        # Upstream's method would relabel tokens of steps in flight.
        call = RenameVersion(weight_version)
        answer = worker_calls.ask(controller_of(self), call)
        if "error" in answer:
            raise ValueError(answer["error"]["message"])

    return set_weight_version


def _after_write_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: upstream.EngineCore) -> Any:
        controller = controller_of(self)
        if self.scheduler.requests:
            controller.adoption.before_step()
        with controller.outside_writes.around_step():
            return original(self)

    return step


def _intercept_worker_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: upstream.EngineCore,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from vllm.inflight.engine.compat import worker_calls
        from vllm.inflight.engine.integrity.outside_writes import is_harmless
        from vllm.inflight.engine.pause.absorption import Need

        controller = find_controller(self)
        if controller is None:  # the engine is still starting
            return original(self, method, timeout, args, kwargs)
        has_group = controller.has_actor_group
        if worker_calls.intercepts(
            self.vllm_config, method, args, has_actor_group=has_group
        ):
            return worker_calls.execute(controller, method, args, kwargs)
        adopted = controller.adoption.recognised(method, args, kwargs)
        if adopted is not None:
            return controller.adoption.execute(adopted)

        known = controller.adoption.known_write(method, args, kwargs)

        def call() -> Any:
            with controller.adoption.in_worker_call():
                return controller.outside_writes.call(
                    method, lambda: original(self, method, timeout, args, kwargs), known
                )

        if is_harmless(method):
            return call()
        return controller.pauses.absorption.before(Need.WORKER_CALL, call)

    return collective_rpc


def _ends_unmarked(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_prefix_cache(
        self: upstream.EngineCore,
        reset_running_requests: bool = False,
        reset_connector: bool = False,
    ) -> Any:
        from vllm.inflight.engine.pause.absorption import Need

        def reset() -> Any:
            return original(self, reset_running_requests, reset_connector)

        if (controller := find_controller(self)) is None:
            return reset()
        controller.adoption.end_unmarked("reset_prefix_cache")
        controller.adoption.end_direct_loads()
        if not reset_running_requests:
            return reset()
        return controller.pauses.absorption.before(Need.CACHE_RESET, reset)

    return reset_prefix_cache


def _after_pause(original: Callable[..., Any]) -> Callable[..., Any]:
    def save_sharded_state(
        self: upstream.EngineCore,
        path: str,
        pattern: str | None = None,
        max_size: int | None = None,
    ) -> Any:
        from vllm.inflight.engine.pause.absorption import Need

        return controller_of(self).pauses.absorption.before(
            Need.SAVE, lambda: original(self, path, pattern, max_size)
        )

    return save_sharded_state


def _add_utility(_: None) -> Callable[..., Any]:
    from vllm.inflight.engine.utility import inflight

    return inflight


_CORE = "vllm.v1.engine.core:EngineCore"

PATCHES = [
    Patch(
        target=f"{_CORE}._initialize_effective_attention_block_size",
        expects=("self",),
        why="each engine core gets its controller once its scheduler exists",
        remove_when="upstream offers a hook after scheduler construction",
        around=_with_controller,
        since="0.31.0",
    ),
    Patch(
        target=f"{_CORE}.__init__",
        expects=(
            "self",
            "vllm_config",
            "executor_class",
            "log_stats",
            "executor_fail_callback",
            "include_finished_set",
        ),
        why="each engine core gets its controller, at the end of its constructor",
        remove_when="upstream offers a hook after scheduler construction",
        around=_controlled,
        before="0.31.0",
    ),
    *(
        Patch(
            target=f"vllm.v1.engine.core:{each}.run_busy_loop",
            expects=("self",),
            why="a spawned engine core gets its controller after its constructor",
            remove_when="upstream offers a hook after scheduler construction",
            around=_controlled_at_last,
            before="0.31.0",
        )
        for each in ("EngineCoreProc", "DPEngineCoreProc")
    ),
    Patch(
        target=f"{_CORE}._attach_weight_version",
        expects=("self", "outputs"),
        why="a step gets its label when it is scheduled; upstream's when it is read",
        remove_when="upstream stamps steps at schedule time",
        around=_keep_stamps,
        since="0.32.0",
    ),
    Patch(
        target=f"{_CORE}.shutdown",
        expects=("self",),
        why="the controller's threads end with their engine core",
        remove_when="upstream offers a hook at engine shutdown",
        around=_close_controller,
    ),
    Patch(
        target=f"{_CORE}.set_weight_version",
        expects=("self", "weight_version"),
        why="a new label begins a version and does not change labels of old tokens",
        remove_when="upstream binds the label to the weights",
        around=_rename,
    ),
    *(
        Patch(
            target=f"{_CORE}.{name}",
            expects=("self",),
            why="a step after an out-of-band write is stamped with a new version",
            remove_when="upstream reports every write into live weights",
            around=_after_write_check,
        )
        for name in ("step", "step_with_batch_queue")
    ),
    Patch(
        target=f"{_CORE}.collective_rpc",
        expects=("self", "method", "timeout", "args", "kwargs"),
        why="upstream's worker calls that update weights become a transaction",
        remove_when="upstream's updates are transactional",
        around=_intercept_worker_calls,
    ),
    Patch(
        target=f"{_CORE}.reset_prefix_cache",
        expects=("self", "reset_running_requests", "reset_connector"),
        why="a version whose end its framework has not marked is never committed",
        remove_when="frameworks tell the engine when a version is complete",
        around=_ends_unmarked,
    ),
    Patch(
        target=f"{_CORE}.save_sharded_state",
        expects=("self", "path", "pattern", "max_size"),
        why="an absorbed pause takes force before the weights are saved",
        remove_when="upstream saves weights by a worker call",
        around=_after_pause,
    ),
    Patch(
        target=f"{_CORE}.inflight",
        expects=None,
        why="one utility method carries every control call",
        remove_when="upstream has these calls",
        around=_add_utility,
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCoreProc._handle_client_request",
        expects=("self", "request_type", "request"),
        why="calls of other threads run between two steps",
        remove_when="upstream has a queue of calls for the loop's thread",
        around=_drain_step_queue,
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCoreProc.pause_generation",
        expects=("self", "mode", "clear_cache"),
        why="a pause that is asked of the engine core respects the owner of a pause",
        remove_when="upstream's pauses have an owner and a lease",
        around=_with_owner,
        since="0.33.0",
    ),
    Patch(
        target="vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs",
        expects=("self", "local_unfinished"),
        why="data-parallel engines that step together commit and continue at one step",
        remove_when="upstream commits versions at its data-parallel sync points",
        around=_meet,
        since="0.30.0",
    ),
    Patch(
        target="vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs",
        expects=("self", "local_unfinished"),
        why="data-parallel engines that step together commit and continue at one step",
        remove_when="upstream commits versions at its data-parallel sync points",
        around=partial(_meet, is_sync_point=_is_32nd_step),
        before="0.30.0",
    ),
    Patch(
        target="vllm.v1.engine.core:DPEngineCoreProc._pause_complete",
        expects=("self",),
        why="data-parallel engines agree on each pause, even if one got another pause",
        remove_when="upstream's engines count the pauses that they agree on",
        around=_count_pauses,
    ),
]
