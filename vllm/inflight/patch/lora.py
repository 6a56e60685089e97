"""Changes around LoRA adapters: loaded everywhere or nowhere, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.context import EngineContext
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.patch.record import Patch


# ---------------------------------------------------------------------- engine core
def _load_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_lora(self: upstream.EngineCore, lora_request: upstream.LoRARequest) -> bool:
        from vllm.inflight.engine.scheduling import lora

        if lora.add(EngineContext.of(self), lora_request):
            return True
        added: bool = original(self, lora_request)
        return added

    return add_lora


def _load_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(
        self: upstream.EngineCore, request: upstream.Request, request_wave: int = 0
    ) -> None:
        from vllm.inflight.engine.scheduling import abort, lora

        controller = EngineContext.of(self)
        if (why := lora.admit(controller, request)) is not None:
            abort.end_with_error(controller, request, why)
            return
        original(self, request, request_wave)

    return add_request


def _count_drop(original: Callable[..., Any]) -> Callable[..., Any]:
    def remove_lora(self: upstream.EngineCore, lora_id: int) -> bool:
        SchedulerState.of(self.scheduler).adapters.drop(lora_id)
        removed: bool = original(self, lora_id)
        return removed

    return remove_lora


# -------------------------------------------------------------------------- workers
def _from_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_adapter(
        self: upstream.WorkerLoRAManager, lora_request: upstream.LoRARequest
    ) -> Any:
        from vllm.inflight.worker.lora import kept_or_read

        return kept_or_read(self, lora_request, lambda each: original(self, each))

    return _load_adapter


def _merged_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def _create_merged_loras_inplace(
        self: upstream.LoRAModelManager, lora_model: Any
    ) -> None:
        from vllm.inflight.worker.lora import MergedAdapter

        state = MergedAdapter.of(lora_model)
        if not state.is_merged:
            original(self, lora_model)
            state.is_merged = True

    return _create_merged_loras_inplace


_CORE = "vllm.v1.engine.core:EngineCore"

PATCHES = [
    Patch(
        target="vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
        expects=("self", "lora_request"),
        why="a step takes an adapter that made room for another from memory, and not "
        "from files that may be gone",
        remove_when="upstream's requests name an adapter, and not its files",
        around=_from_memory,
    ),
    Patch(
        target="vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace",
        expects=("self", "lora_model"),
        why="an adapter that comes back from memory has been merged already",
        remove_when="upstream's merging can be repeated",
        around=_merged_once,
    ),
    Patch(
        target=f"{_CORE}.add_lora",
        expects=("self", "lora_request"),
        why="an adapter is loaded on all ranks or none, and reads no KV of another",
        remove_when="upstream loads them so, and its hashes tell loads apart",
        around=_load_everywhere,
    ),
    Patch(
        target=f"{_CORE}.add_request",
        expects=("self", "request", "request_wave"),
        why="an adapter that cannot be loaded ends its request, and not the engine",
        remove_when="upstream loads adapters before the step that needs them",
        around=_load_before,
    ),
    Patch(
        target=f"{_CORE}.remove_lora",
        expects=("self", "lora_id"),
        why="a name that was let go stands for whatever it is given to next, and reads "
        "no KV of what it stood for",
        remove_when="upstream's block hashes tell loads of an adapter apart",
        around=_count_drop,
    ),
]
