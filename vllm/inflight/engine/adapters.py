"""How often each adapter was loaded, as far as the prefix cache has to know.

A worker loads an adapter when it is asked to (`add_lora`, or a request of one it does
not have) and loads it again under the same name when `load_inplace` says so, or under
another number after the name was let go. vLLM's block hashes know the name and the
path, which are the same then; the KV is not. So loads are counted by name, and the
count is a part of a request's root.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class Adapters:
    """Those of one engine core, as `LoRARequest`s name them."""

    def __init__(self) -> None:
        self._num_loads: Counter[str] = Counter()
        self._loads: dict[tuple[str, int], int] = {}
        """(name, number) → which load of that name it is; the first one is 0."""

    def load(self, adapter: Any) -> None:
        """Note that workers are about to load `adapter`, if they will."""
        key = adapter.lora_name, adapter.lora_int_id
        if adapter.load_inplace or key not in self._loads:
            self._loads[key] = self._num_loads[adapter.lora_name]
            self._num_loads[adapter.lora_name] += 1

    def drop(self, number: int) -> None:
        """Note that workers let the adapter of this number go."""
        self._loads = {k: load for k, load in self._loads.items() if k[1] != number}

    def load_of(self, adapter: Any) -> int:
        """Which load of its name `adapter` is, or will be; 0 for no adapter."""
        if adapter is None:
            return 0
        key = adapter.lora_name, adapter.lora_int_id
        return self._loads.get(key, self._num_loads[adapter.lora_name])
