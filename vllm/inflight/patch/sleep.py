"""Changes for sleep: updates and sleep of an engine do not disturb each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.patch.controllers import controller_of
from vllm.inflight.patch.records.record import Patch
from vllm.inflight.update import KV_CACHE, WEIGHTS
from vllm.inflight.worker.worker_state import WorkerState

ALWAYS_KEPT = ("runtime", "cudagraph")
"""Tags of what nobody can fill again: upstream's own sleep keeps it at every level.

These pools are there from 0.32 on. An extension that names what it keeps was often
written before.
"""

LESS_IS_FREE = "Memory usage increased after sleeping"
"""How upstream's error begins if less of the GPU is free than before a sleep."""

logger = upstream.init_logger(__name__)


def _sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: Any, level: int = 1, mode: str = "abort") -> Any:
        def give_back(level: int) -> Any:
            return original(self, level, mode)

        return controller_of(self).sleep.sleep(level, give_back, mode)

    return sleep


def _wake(original: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        if tags is not None:
            # Upstream wakes nothing if one of them is awake.
            asleep = {*self.model_executor.sleeping_tags, "scheduling"}
            tags = [tag for tag in tags if tag in asleep]
        controller_of(self).adoption.end_unmarked("wake_up")
        return controller_of(self).sleep.wake(lambda: original(self, tags))

    return wake_up


def _wake_and_tell(original: Callable[..., Any]) -> Callable[..., Any]:
    def is_awake(self: Any, tags: list[str] | None) -> bool:
        original(self, tags)
        return not self.model_executor.is_sleeping

    return _wake(is_awake)


def _with_kept_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def release_kv_cache_memory(self: upstream.EngineCore) -> Any:
        return controller_of(self).sleep.release_kv_cache(lambda: original(self))

    return release_kv_cache_memory


def _asleep_after_a_failure(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: upstream.Executor, level: int = 1) -> None:
        try:
            original(self, level)
        except Exception:
            self.sleeping_tags |= {"weights", "kv_cache"}
            raise

    return sleep


def _said_asleep_after_a_failure(original: Callable[..., Any]) -> Callable[..., Any]:
    asleep = _asleep_after_a_failure(original)

    def sleep(self: upstream.Executor, level: int = 1) -> None:
        try:
            asleep(self, level)
        except Exception:
            self.is_sleeping = True  # later releases conclude it from the tags
            raise

    return sleep


def _outside_of_pools(original: Callable[..., Any]) -> Callable[..., Any]:
    def _maybe_get_memory_pool_context(self: upstream.Worker, tag: str) -> Any:
        from vllm.inflight.worker.memory.placement import is_wanted

        if tag == WEIGHTS and is_wanted(self.vllm_config):
            return nullcontext()  # pools do not nest, and the arena has its own pool
        context = original(self, tag)
        if not isinstance(context, nullcontext):
            from vllm.inflight.patch import apply_late
            from vllm.inflight.worker.integrity.pool_watch import watch_pools

            apply_late(_CUMEM)
            watch_pools(self)
        return context

    return _maybe_get_memory_pool_context


def _noted_in_pools(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: Any, offload_tags: tuple[str, ...] | str | None = None) -> None:
        from vllm.inflight.worker.integrity.pool_watch import note_pools_asleep

        kept = self.default_tag if offload_tags is None else offload_tags
        kept = (kept,) if isinstance(kept, str) else tuple(kept)
        note_pools_asleep(self, None, kept)
        original(self, (*kept, *ALWAYS_KEPT))

    return sleep


def _noted_discarded_in_pools(original: Callable[..., Any]) -> Callable[..., Any]:
    def discard(self: Any, tags: tuple[str, ...] | str) -> None:
        from vllm.inflight.worker.integrity.pool_watch import note_pools_asleep

        note_pools_asleep(self, tags, ())
        original(self, tags)

    return discard


def _noted_awake_in_pools(original: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        from vllm.inflight.worker.integrity.pool_watch import note_pools_awake

        original(self, tags)
        note_pools_awake(self, tags)

    return wake_up


def _notes_itself(worker: upstream.Worker) -> bool:
    """Whether what gives the worker's memory back has noted all that it gave.

    The allocator of upstream's pools does, and our backend, which is derived of
    upstream's. A backend of somebody else's does not.
    """
    backend: Any = getattr(worker, "_sleep_mode_backend", None)
    is_known = backend is None or isinstance(backend, upstream.CuMemBackend)
    return is_known or not worker.model_config.enable_sleep_mode


def _noted_asleep(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(self: upstream.Worker, level: int = 1) -> None:
        from vllm.inflight.worker.integrity.outside_writes import note_asleep

        kept = (WEIGHTS,) if level == 1 else ()
        try:
            original(self, level)
        except BaseException as error:
            # Upstream looks when all has been given back. It counts what other
            # processes have taken of the GPU meanwhile.
            if not str(error).startswith(LESS_IS_FREE):
                if not _notes_itself(self):  # what it has given back is not known
                    note_asleep(self, (WEIGHTS, KV_CACHE), kept)
                raise
            logger.warning(
                "this engine sleeps, and less memory of its GPU is free than before: "
                "other processes have taken some meanwhile"
            )
        if self.model_config.enable_sleep_mode:
            note_asleep(self, (WEIGHTS, KV_CACHE), kept)

    return sleep


def _noted_discarded(original: Callable[..., Any]) -> Callable[..., Any]:
    def discard(self: upstream.Worker, tags: tuple[str, ...]) -> None:
        from vllm.inflight.worker.integrity.outside_writes import note_asleep

        parts = {WEIGHTS, KV_CACHE} & {*tags}
        try:
            original(self, tags)
        except BaseException:
            if not _notes_itself(self):
                note_asleep(self, parts, ())
            raise
        if self.model_config.enable_sleep_mode:
            note_asleep(self, parts, ())

    return discard


def _adapters_again(original: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(self: upstream.Worker, tags: list[str] | None = None) -> None:
        from vllm.inflight.worker.integrity.outside_writes import note_awake
        from vllm.inflight.worker.lora import write_again
        from vllm.inflight.worker.memory.placement import is_wanted
        from vllm.inflight.worker.step_tracker import between_steps

        original(self, tags)
        note_awake(self, tags, keeps_some=True)
        if WorkerState.of(self).stager is None:
            return  # upstream updates this engine, and unloads adapters each time
        if (tags is None or "weights" in tags) and not is_wanted(self.vllm_config):
            with between_steps(self):
                write_again(self.model_runner)

    return wake_up


def inflight_prepare_sleep(self: Any, level: int) -> dict[str, Any]:
    """Do the parts of a sleep that may fail; level 0 cancels the preparation."""
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
_CUMEM = "vllm.device_allocator.cumem"
_POOLS = f"{_CUMEM}:CuMemAllocator"

PATCHES = [
    Patch(
        target=f"{_CORE}.sleep",
        expects=("self", "level", "mode"),
        why="no update writes into memory that a sleep frees",
        remove_when="upstream coordinates its updates and its sleep",
        around=_sleep,
    ),
    Patch(
        target=f"{_CORE}.wake_up",
        expects=("self", "tags"),
        why="waking up ends no pause call's pause, and decoding waits for weights",
        remove_when="upstream coordinates its updates and its sleep",
        around=_wake,
        since="0.31.0",
    ),
    Patch(
        target=f"{_CORE}.wake_up",
        expects=("self", "tags"),
        why="waking up ends no pause call's pause, and decoding waits for weights; "
        "before 0.31, upstream does not tell whether the engine is awake",
        remove_when="0.31 is the oldest supported release",
        around=_wake_and_tell,
        before="0.31.0",
    ),
    Patch(
        target=f"{_CORE}.release_kv_cache_memory",
        expects=("self",),
        why="requests that a pause keeps stay when the KV cache is given back",
        remove_when="upstream retracts the requests that it calls kept",
        around=_with_kept_requests,
        since="0.31.0",
    ),
    Patch(
        target="vllm.v1.executor.abstract:Executor.sleep",
        expects=("self", "level"),
        why="if one rank fails to sleep, the others sleep and can be woken up",
        remove_when="upstream does for sleep what it does for discard",
        around=_asleep_after_a_failure,
        since="0.31.0",
    ),
    Patch(
        target="vllm.v1.executor.abstract:Executor.sleep",
        expects=("self", "level"),
        why="if one rank fails to sleep, the others sleep and can be woken up",
        remove_when="0.31 is the oldest supported release",
        around=_said_asleep_after_a_failure,
        before="0.31.0",
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context",
        expects=("self", "tag"),
        why="the weights in the arena are outside of the pools of upstream's sleep; "
        "the pools learn whose memory they have",
        remove_when="upstream allows a sleep backend to have pools of its own",
        around=_outside_of_pools,
    ),
    Patch(
        target=f"{_POOLS}.sleep",
        expects=("self", "offload_tags"),
        why="a worker extension may give memory back without a call of the worker, and "
        "does not name pools that are newer than itself",
        remove_when="upstream reports which weights of a worker have memory, and keeps "
        "those pools in its allocator",
        around=_noted_in_pools,
        only_on="cuda",
        is_late=True,
    ),
    Patch(
        target=f"{_POOLS}.discard",
        expects=("self", "tags"),
        why="a worker extension may give memory back without a call of the worker",
        remove_when="upstream reports which weights of a worker have memory",
        around=_noted_discarded_in_pools,
        only_on="cuda",
        is_late=True,
    ),
    Patch(
        target=f"{_POOLS}.wake_up",
        expects=("self", "tags"),
        why="weights without their content are marked before anything can write them",
        remove_when="upstream reports which weights of a worker have memory",
        around=_noted_awake_in_pools,
        only_on="cuda",
        is_late=True,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.sleep",
        expects=("self", "level"),
        why="weights without memory are not read, whichever call put them to sleep. A "
        "sleep does not fail because another process has taken memory meanwhile",
        remove_when="upstream reports which weights of a worker have memory, and looks "
        "at its own memory alone",
        around=_noted_asleep,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.discard",
        expects=("self", "tags"),
        why="weights whose memory was discarded are not read",
        remove_when="upstream reports which weights of a worker have memory",
        around=_noted_discarded,
        since="0.31.0",
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.wake_up",
        expects=("self", "tags"),
        why="adapters stay loaded, even if their memory was in upstream's pool",
        remove_when="upstream keeps the tensors of adapters during a sleep",
        around=_adapters_again,
    ),
    Patch(
        target="vllm.v1.worker.worker_base:WorkerBase.inflight_prepare_sleep",
        expects=None,
        why="memory is freed when every rank is ready for it, or on no rank",
        remove_when="upstream coordinates its updates and its sleep",
        around=lambda _: inflight_prepare_sleep,
    ),
]
