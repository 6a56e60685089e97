"""Changes for LoRA adapters: they load on all ranks or on none, and are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.inflight import upstream
from vllm.inflight.engine.scheduling.scheduler_state import SchedulerState
from vllm.inflight.patch.controllers import controller_of
from vllm.inflight.patch.records.record import Patch


# ---------------------------------------------------------------------- engine core
def _load_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_lora(self: upstream.EngineCore, lora_request: upstream.LoRARequest) -> bool:
        from vllm.inflight.engine.scheduling import lora

        wait_for_steps = controller_of(self).ranks.wait_for_steps
        if lora.add(self, lora_request, wait_for_steps):
            return True
        added: bool = original(self, lora_request)
        return added

    return add_lora


def _load_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_request(
        self: upstream.EngineCore, request: upstream.Request, request_wave: int = 0
    ) -> None:
        from vllm.inflight.engine.pause import abort
        from vllm.inflight.engine.scheduling import lora

        controller = controller_of(self)
        why = lora.admit(self, request, controller.ranks.wait_for_steps)
        if why is not None:
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
        why="a step reloads an evicted adapter from host memory, and not from files "
        "that may be gone",
        remove_when="upstream's requests name an adapter and not its files",
        around=_from_memory,
    ),
    Patch(
        target="vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace",
        expects=("self", "lora_model"),
        why="an adapter that is reloaded from host memory has been merged already",
        remove_when="upstream's merging can be repeated",
        around=_merged_once,
    ),
    Patch(
        target=f"{_CORE}.add_lora",
        expects=("self", "lora_request"),
        why="an adapter loads on all ranks or on none, and reads no KV of another",
        remove_when="upstream does this, and its block hashes contain the load",
        around=_load_everywhere,
    ),
    Patch(
        target=f"{_CORE}.add_request",
        expects=("self", "request", "request_wave"),
        why="an adapter that cannot be loaded ends its request and not the engine",
        remove_when="upstream loads adapters before the step that needs them",
        around=_load_before,
    ),
    Patch(
        target=f"{_CORE}.remove_lora",
        expects=("self", "lora_id"),
        why="a name that is used again after an unload reads no KV of the old adapter",
        remove_when="upstream's block hashes contain the load of an adapter",
        around=_count_drop,
    ),
]
