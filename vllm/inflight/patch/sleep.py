"""Changes around sleep: engine core and workers give memory back, and get it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.patch.record import Patch
from vllm.inflight.worker.worker_state import WorkerState


def _sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: Any, level: int = 1, mode: str = "abort") -> Any:
        def give_back(level: int) -> Any:
            return original(self, level, mode)

        return EngineContext.of(self).sleep.sleep(level, give_back)

    return sleep


def _wake(original: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        return EngineContext.of(self).sleep.wake(lambda: original(self, tags))

    return wake_up


def _asleep_after_a_failure(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: upstream.Executor, level: int = 1) -> None:
        try:
            original(self, level)
        except Exception:
            self.sleeping_tags |= {"weights", "kv_cache"}
            raise

    return sleep


def _outside_of_pools(original: Callable[..., Any]) -> Callable[..., Any]:
    def _maybe_get_memory_pool_context(self: upstream.Worker, tag: str) -> Any:
        from vllm.inflight.worker.memory.placement import is_wanted

        if tag == "weights" and is_wanted(self.vllm_config):
            return nullcontext()  # pools do not nest, and the arena's is the inner one
        return original(self, tag)

    return _maybe_get_memory_pool_context


def _note_asleep(worker: upstream.WorkerBase, is_asleep: bool) -> None:
    if (wire := WorkerState.of(worker).tripwire) is not None:
        wire.is_asleep = is_asleep


def _noted_asleep(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: upstream.Worker, level: int = 1) -> None:
        _note_asleep(self, True)  # also if it fails on its way
        original(self, level)

    return sleep


def _noted_discarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def discard(self: upstream.Worker, tags: tuple[str, ...]) -> None:
        if "weights" in tags:
            _note_asleep(self, True)
        original(self, tags)

    return discard


def _adapters_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: upstream.Worker, tags: list[str] | None = None) -> None:
        from vllm.inflight.worker.lora import write_again
        from vllm.inflight.worker.memory.placement import is_wanted
        from vllm.inflight.worker.step_tracker import between_steps

        original(self, tags)
        if tags is None or "weights" in tags:
            _note_asleep(self, False)
        if WorkerState.of(self).stager is None:
            return  # updates are upstream's, which lets adapters go at each
        if (tags is None or "weights" in tags) and not is_wanted(self.vllm_config):
            with between_steps(self):
                write_again(self.model_runner)

    return wake_up


def inflight_prepare_sleep(self: Any, level: int) -> dict[str, Any]:
    """Prepare a sleep, as far as it can fail; level 0 takes that back."""
    from vllm.inflight.patch.worker_rpc import answered

    def prepare() -> None:
        if (stager := WorkerState.of(self).stager) is None:
            return
        if level:
            stager.let_go()
        backend: Any = getattr(self, "_sleep_mode_backend", None)
        if hasattr(backend, "prepare"):
            backend.prepare(level)

    return answered(prepare)


_CORE = "vllm.v1.engine.core:EngineCore"

PATCHES = [
    Patch(
        target=f"{_CORE}.sleep",
        expects=("self", "level", "mode"),
        why="no update is at work on memory that is given back",
        remove_when="upstream's updates and its sleep know of each other",
        around=_sleep,
    ),
    Patch(
        target=f"{_CORE}.wake_up",
        expects=("self", "tags"),
        why="waking up ends no pause of others, and nothing decodes without weights",
        remove_when="upstream's updates and its sleep know of each other",
        around=_wake,
    ),
    Patch(
        target="vllm.v1.executor.abstract:Executor.sleep",
        expects=("self", "level"),
        why="where one rank fails to sleep, others sleep: waking up is the way on",
        remove_when="upstream does for sleep what it does for discard",
        around=_asleep_after_a_failure,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context",
        expects=("self", "tag"),
        why="the arena's weights lie in no pool of upstream's sleep",
        remove_when="upstream lets a sleep backend have pools of its own",
        around=_outside_of_pools,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.sleep",
        expects=("self", "level"),
        why="weights without memory are not looked at, whoever sent them to sleep",
        remove_when="upstream tells which weights of a worker have memory",
        around=_noted_asleep,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.discard",
        expects=("self", "tags"),
        why="the same, of memory that is given back by itself",
        remove_when="upstream tells which weights of a worker have memory",
        around=_noted_discarded,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.wake_up",
        expects=("self", "tags"),
        why="adapters stay loaded, also those that lay in a pool of upstream's",
        remove_when="upstream keeps the stacks of adapters over a sleep",
        around=_adapters_again,
    ),
    Patch(
        target="vllm.v1.worker.worker_base:WorkerBase.inflight_prepare_sleep",
        expects=None,
        why="memory is given back when every rank is ready for it, or on none",
        remove_when="upstream's updates and its sleep know of each other",
        around=lambda _: inflight_prepare_sleep,
    ),
]
