"""Changes around LoRA adapters: loaded everywhere or nowhere, and counted."""

from __future__ import annotations

from typing import Any

from vllm.inflight.patch.record import Patch


# ---------------------------------------------------------------------- engine core
def _load_everywhere(original: Any) -> Any:
    def add_lora(self: Any, lora_request: Any) -> bool:
        from vllm.inflight.engine.adapters import load_everywhere, require_allowed

        require_allowed(lora_request, self.vllm_config)
        # In a turn of its own: whoever is scheduled from here on has the new one.
        self.inflight_gate.ranks.wait_for_steps(self.batch_queue)
        if not load_everywhere(self.model_executor, lora_request):
            added: bool = original(self, lora_request)
            return added
        self.scheduler.inflight_adapters.load(lora_request)
        return True

    return add_lora


def _count_drop(original: Any) -> Any:
    def remove_lora(self: Any, lora_id: int) -> bool:
        self.scheduler.inflight_adapters.drop(lora_id)
        removed: bool = original(self, lora_id)
        return removed

    return remove_lora


# -------------------------------------------------------------------------- workers
def _from_its_last_files(original: Any) -> Any:
    def _apply_adapters(self: Any, lora_requests: Any) -> None:
        from vllm.inflight.commit.adapter import last_loaded

        original(self, last_loaded(self, lora_requests))

    return _apply_adapters


def _forget_its_files(original: Any) -> Any:
    def remove_lora(self: Any, lora_id: int) -> bool:
        from vllm.inflight.commit.adapter import let_go

        let_go(self.model_runner.lora_manager, lora_id)
        removed: bool = original(self, lora_id)
        return removed

    return remove_lora


_CORE = "vllm.v1.engine.core:EngineCore"

PATCHES = [
    Patch(
        target="vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters",
        expects=("self", "lora_requests"),
        why="a request that was asked before an adapter was replaced does not bring "
        "the old one back",
        remove_when="upstream's requests name an adapter, and not its files",
        around=_from_its_last_files,
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.remove_lora",
        expects=("self", "lora_id"),
        why="a name that was let go stands for whatever it is given to next",
        remove_when="upstream's requests name an adapter, and not its files",
        around=_forget_its_files,
    ),
    Patch(
        target=f"{_CORE}.add_lora",
        expects=("self", "lora_request"),
        why="an adapter is loaded on all ranks or none, and reads no KV of another",
        remove_when="upstream loads them so, and its hashes tell loads apart",
        around=_load_everywhere,
    ),
    Patch(
        target=f"{_CORE}.remove_lora",
        expects=("self", "lora_id"),
        why="the same, where the name was let go in between",
        remove_when="upstream's block hashes tell loads of an adapter apart",
        around=_count_drop,
    ),
]
