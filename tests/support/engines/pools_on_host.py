"""Upstream's memory pools on a CPU engine: what sleeps there loses its content.

Upstream's allocator needs a GPU. This one takes the same calls, and overwrites the
weights and the KV of an engine instead of giving their memory back.
"""

from typing import Any

import torch

from tests.support.engines.sleeping import LOST
from tests.support.engines.user_extension import Extension


class Pools:
    """A stand-in for upstream's allocator, whose parts are tagged as upstream's are."""

    def __init__(self) -> None:
        self.worker: Any = None
        """Whose memory it is; None until its engine runs."""
        self.asleep: dict[str, list[torch.Tensor] | None] = {}
        """Part → its content, or None if that was given up."""

    def _tensors(self, tag: str) -> list[torch.Tensor]:
        runner = self.worker.model_runner
        if tag == "kv_cache":
            return list(runner.kv_caches)
        return [param.data for param in runner.get_model().parameters()]

    def _give_back(self, tag: str, is_kept: bool) -> None:
        if tag in self.asleep:
            return
        tensors = self._tensors(tag)
        self.asleep[tag] = [t.clone() for t in tensors] if is_kept else None
        for tensor in tensors:
            tensor.fill_(LOST)

    def sleep(self, offload_tags: Any = None) -> None:
        for tag in ("weights", "kv_cache"):
            self._give_back(tag, tag in (offload_tags or ()))

    def discard(self, tags: Any) -> None:
        for tag in tags:
            self._give_back(tag, False)

    def wake_up(self, tags: Any = None) -> None:
        for tag in [t for t in self.asleep if tags is None or t in tags]:
            kept = self.asleep.pop(tag)
            for tensor, content in zip(self._tensors(tag), kept or (), strict=False):
                tensor.copy_(content)


class SleepingExtension(Extension):
    """A worker extension that puts its own worker to sleep, in two ways."""

    def tests_sleep_pools(self, *kept: str) -> None:
        """Ask the allocator, as SkyRL's `skyrl_sleep_for_weight_sync` does."""
        _allocator().sleep(offload_tags=kept)

    def tests_wake_pools(self, tags: list[str] | None = None) -> None:
        """Ask the allocator, as SkyRL's `skyrl_wake_for_weight_sync` does."""
        _allocator().wake_up(tags)

    def tests_sleep_worker(self, level: int) -> None:
        """Sleep by the worker's backend, as ROLL's `offload_states` does."""
        self._sleep_mode_backend.suspend(level)  # type: ignore[attr-defined]

    def tests_wake_worker(self) -> None:
        """Wake up by the worker's backend, as ROLL's `load_states` does."""
        self._sleep_mode_backend.resume(None)  # type: ignore[attr-defined]

    def tests_sleep_and_fill(self, folder: str, names: list[str] | None) -> None:
        """Lose the weights, get their memory again and load, all in one call."""
        _allocator().sleep(offload_tags=())
        _allocator().wake_up()
        self.tests_load(folder, names)


def _allocator() -> Any:
    from vllm import device_allocator

    return device_allocator.get_mem_allocator_instance()
