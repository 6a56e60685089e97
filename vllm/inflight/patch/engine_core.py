"""Changes in the engine core: the controller, and turns between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.patch.record import Patch


def _with_gate(original: Callable[..., Any]) -> Callable[..., Any]:
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

        # Upstream's own overwrites what the step was stamped with.
        version = EngineContext.of(self).version
        for output in outputs.values():
            if output.weight_version is None:
                output.weight_version = Stamp(version.label, version.epoch).encode()

    return _attach_weight_version


def _close_gate(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: upstream.EngineCore) -> None:
        if (controller := EngineContext.find(self)) is not None:
            controller.close()
        original(self)

    return shutdown


def _drain_turns(original: Callable[..., Any]) -> Callable[..., Any]:
    def _handle_client_request(
        self: upstream.EngineCore, request_type: object, request: object
    ) -> None:
        EngineContext.of(self).step_queue.drain()
        original(self, request_type, request)

    return _handle_client_request


def _meet(original: Callable[..., Any]) -> Callable[..., Any]:
    def _has_global_unfinished_reqs(
        self: upstream.EngineCore, local_unfinished: bool
    ) -> Any:
        dp_commit, was_pending = EngineContext.of(self).dp_commit, self.pending_pause
        is_anybody_busy = original(self, local_unfinished)
        if self.step_counter != 1 and self.step_counter % self.dp_sync_interval:
            return is_anybody_busy  # nobody has met
        if was_pending and not self.pending_pause and dp_commit.have_agreed():
            is_anybody_busy = True
        return dp_commit.meet() or is_anybody_busy

    return _has_global_unfinished_reqs


def _count_pauses(original: Callable[..., Any]) -> Callable[..., Any]:
    def _pause_complete(self: upstream.EngineCore) -> Any:
        if self.pending_pause:
            EngineContext.of(self).dp_commit.num_pauses_left += 1
        return original(self)

    return _pause_complete


def _rename(_: Callable[..., Any]) -> Callable[..., Any]:
    def set_weight_version(self: upstream.EngineCore, weight_version: str) -> None:
        from vllm.inflight.engine.compat import worker_calls

        # Upstream's own relabels tokens that are on their way.
        body = {"weight_version": weight_version}
        answer = worker_calls.ask(EngineContext.of(self), "rename", body)
        if "error" in answer:
            raise ValueError(answer["error"]["message"])

    return set_weight_version


def _after_a_look(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: upstream.EngineCore) -> Any:
        with EngineContext.of(self).outside_writes.around_step():
            return original(self)

    return step


def _redirect_phases(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(
        self: upstream.EngineCore,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from vllm.inflight.engine.compat import worker_calls

        controller = EngineContext.find(self)
        if controller is None:  # the engine is still starting
            return original(self, method, timeout, args, kwargs)
        has_group = controller.has_actor_group
        if worker_calls.intercepts(
            self.vllm_config, method, args, has_actor_group=has_group
        ):
            return worker_calls.execute(controller, method, args, kwargs)
        return controller.outside_writes.call(
            method, lambda: original(self, method, timeout, args, kwargs)
        )

    return collective_rpc


def inflight(self: upstream.EngineCore, method: str, body: dict[str, Any]) -> Any:
    """Answer a control call of vLLM in-flight."""
    return EngineContext.of(self).call(method, body)


_CORE = "vllm.v1.engine.core:EngineCore"

PATCHES = [
    Patch(
        target=f"{_CORE}._initialize_effective_attention_block_size",
        expects=("self",),
        why="each engine core gets its controller once its scheduler exists",
        remove_when="upstream offers a hook after scheduler construction",
        around=_with_gate,
    ),
    Patch(
        target=f"{_CORE}._attach_weight_version",
        expects=("self", "outputs"),
        why="upstream labels a step when it is read; we when it was scheduled",
        remove_when="upstream stamps steps at schedule time",
        around=_keep_stamps,
    ),
    Patch(
        target=f"{_CORE}.shutdown",
        expects=("self",),
        why="the watch ends with its engine core",
        remove_when="upstream offers a hook at engine shutdown",
        around=_close_gate,
    ),
    Patch(
        target=f"{_CORE}.set_weight_version",
        expects=("self", "weight_version"),
        why="a new label is a version of its own, not a relabelling of old tokens",
        remove_when="upstream binds the label to the weights",
        around=_rename,
    ),
    *(
        Patch(
            target=f"{_CORE}.{name}",
            expects=("self",),
            why="a step after others have written is stamped as a version of its own",
            remove_when="upstream tells of every write into what it serves",
            around=_after_a_look,
        )
        for name in ("step", "step_with_batch_queue")
    ),
    Patch(
        target=f"{_CORE}.collective_rpc",
        expects=("self", "method", "timeout", "args", "kwargs"),
        why="upstream's phases, called on the workers, become the transaction",
        remove_when="upstream's updates are transactional",
        around=_redirect_phases,
    ),
    Patch(
        target=f"{_CORE}.inflight",
        expects=None,
        why="one utility method carries every control call",
        remove_when="upstream has these calls",
        around=lambda _: inflight,
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCoreProc._handle_client_request",
        expects=("self", "request_type", "request"),
        why="what other threads want done between two steps is done here",
        remove_when="upstream has a queue of calls for the loop's thread",
        around=_drain_turns,
    ),
    Patch(
        target="vllm.v1.engine.core:DPEngineCoreProc._has_global_unfinished_reqs",
        expects=("self", "local_unfinished"),
        why="engines that step together change weights at the same step",
        remove_when="upstream commits versions where its data-parallel engines meet",
        around=_meet,
    ),
    Patch(
        target="vllm.v1.engine.core:DPEngineCoreProc._pause_complete",
        expects=("self",),
        why="engines agree on each pause, also where some have heard of one more",
        remove_when="upstream's engines count the pauses that they agree on",
        around=_count_pauses,
    ),
]
