"""Adapters: loaded on all ranks or on none, and how often each was loaded.

A worker loads an adapter when it is asked to (`add_lora`, or a request of one it does
not have) and loads it again under the same name when `load_inplace` says so, or under
another number after the name was let go. vLLM's block hashes know the name and the
path, which are the same then; the KV is not. So loads are counted by name, and the
count is a part of a request's root, and of what its tokens are stamped with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.inflight.config import InflightConfig
from vllm.inflight.engine.executors import asking
from vllm.inflight.engine.stamp import Loads
from vllm.inflight.engine.turn import whole
from vllm.inflight.errors import EngineFault, Malformed
from vllm.inflight.wire.paths import resolved

Key = tuple[str, int]
"""Name and number of an adapter."""


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
        with asking(executor):
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
        with whole():
            try:
                taken = ask("take")
            except BaseException:  # Ctrl-C while a rank does not answer
                ask("put_back")
                raise
            failed = [reply["error"] for reply in taken if "error" in reply]
            back = ask("put_back") if failed else []
        if failed:
            lost = [reply["error"] for reply in back if "error" in reply]
            what = f"; and what was before is lost: {lost[0]}" if lost else ""
            raise EngineFault(
                f"adapter {name!r} does not fit, and no rank has it: {failed[0]}{what}"
            )
        return True
    finally:
        ask("end")


class Adapters:
    """Those of one engine core, as `LoRARequest`s name them.

    Args:
        requests: of its scheduler, by id.

    """

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self._requests = requests
        self._num_loads: Counter[str] = Counter()
        self._loads: dict[Key, int] = {}
        """Which load of its name each is; the first one is 0."""
        self._listed: set[Key] = set()
        self.replaced: Loads = ()
        """Those of `requests` that are not the first load of their name.

        Another object at a change. It travels with every step.
        """

    def load(self, adapter: Any) -> None:
        """Note that workers are about to load `adapter`, if they will."""
        key = adapter.lora_name, adapter.lora_int_id
        if adapter.load_inplace or key not in self._loads:
            self._count(key)
            self._list()
        elif self._loads[key] and key not in self._listed:
            self._list()

    def drop(self, number: int) -> None:
        """Note that workers let the adapter of this number go.

        Those of its requests that run have it loaded again for their next step.
        """
        for key in [key for key in self._loads if key[1] == number]:
            self._count(key)
        self._list()

    def _count(self, key: Key) -> None:
        self._loads[key] = self._num_loads[key[0]]
        self._num_loads[key[0]] += 1

    def _list(self) -> None:
        adapters = (request.lora_request for request in self._requests.values())
        keys = {(a.lora_name, a.lora_int_id) for a in adapters if a is not None}
        self._listed = {key for key in keys if self._loads.get(key)}
        self.replaced = tuple((*key, self._loads[key]) for key in sorted(self._listed))

    def load_of(self, adapter: Any) -> int:
        """Which load of its name `adapter` is, or will be; 0 for no adapter."""
        if adapter is None:
            return 0
        key = adapter.lora_name, adapter.lora_int_id
        return self._loads.get(key, self._num_loads[adapter.lora_name])
