"""Adapters: loaded on all ranks or on none, and how often each was loaded.

A worker loads an adapter when it is asked to (`add_lora`, or a request of one it does
not have) and loads it again under the same name when `load_inplace` says so, or under
another number after the name was let go. vLLM's block hashes know the name and the
path, which are the same then; the KV is not. So loads are counted by name, and the
count is a part of a request's root, and of what its tokens are stamped with.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.stamp import Loads
from vllm.inflight.errors import EngineFault, Malformed
from vllm.inflight.wire.paths import resolved


def require_allowed(adapter: Any, vllm_config: Any) -> None:
    """Raise `Forbidden` for an adapter outside of the folders that are allowed."""
    if allowed := InflightConfig.of(vllm_config).allowed_paths:
        resolved(Path(adapter.lora_path), allowed)


def load_everywhere(executor: Any, adapter: Any) -> bool:
    """Load an adapter on every rank, or change it on none.

    Returns:
        whether there was something to load.

    Raises:
        Malformed: a rank cannot read it.
        EngineFault: a rank could read it, and could not take it.

    """

    def ask(move: str) -> list[dict[str, Any]]:
        args = (move, adapter)
        replies: list[dict[str, Any]] = executor.collective_rpc(
            "inflight_adapter", args=args
        )
        return replies

    name = adapter.lora_name
    try:
        read = ask("propose")
        if failed := [reply["error"] for reply in read if "error" in reply]:
            raise Malformed(
                f"adapter {name!r} cannot be loaded, and what was loaded under its "
                f"name stays: {failed[0]}"
            )
        if not any(reply["ok"] for reply in read):
            return False
        taken = ask("take")
        if failed := [reply["error"] for reply in taken if "error" in reply]:
            back = ask("put_back")
            lost = [reply["error"] for reply in back if "error" in reply]
            what = f"; and what was before is lost: {lost[0]}" if lost else ""
            raise EngineFault(
                f"adapter {name!r} does not fit, and no rank has it: {failed[0]}{what}"
            )
        return True
    finally:
        ask("end")


class Adapters:
    """Those of one engine core, as `LoRARequest`s name them."""

    def __init__(self) -> None:
        self._num_loads: Counter[str] = Counter()
        self._loads: dict[tuple[str, int], int] = {}
        """(name, number) → which load of that name it is; the first one is 0."""
        self.replaced: Loads = ()
        """All that are not the first load of their name; another object at a change."""

    def load(self, adapter: Any) -> None:
        """Note that workers are about to load `adapter`, if they will."""
        key = adapter.lora_name, adapter.lora_int_id
        if adapter.load_inplace or key not in self._loads:
            self._loads[key] = self._num_loads[adapter.lora_name]
            self._num_loads[adapter.lora_name] += 1
            self._changed()

    def drop(self, number: int) -> None:
        """Note that workers let the adapter of this number go."""
        self._loads = {k: load for k, load in self._loads.items() if k[1] != number}
        self._changed()

    def _changed(self) -> None:
        self.replaced = tuple((*k, load) for k, load in self._loads.items() if load)

    def load_of(self, adapter: Any) -> int:
        """Which load of its name `adapter` is, or will be; 0 for no adapter."""
        if adapter is None:
            return 0
        key = adapter.lora_name, adapter.lora_int_id
        return self._loads.get(key, self._num_loads[adapter.lora_name])
