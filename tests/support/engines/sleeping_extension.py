"""A worker extension that puts its worker to sleep without the engine core.

It asks upstream's allocator, as SkyRL does, and the worker's backend, as ROLL does.
"""

from typing import Any

from tests.support.engines.user_extension import Extension


class SleepingExtension(Extension):
    """Sleeps in two ways, and wakes up."""

    def tests_sleep_pools(self, *kept: str) -> None:
        """Ask the allocator, as SkyRL's `skyrl_sleep_for_weight_sync` does."""
        self._keep_buffers()
        _allocator().sleep(offload_tags=kept)

    def tests_wake_pools(self, tags: list[str] | None = None) -> None:
        """Ask the allocator, as SkyRL's `skyrl_wake_for_weight_sync` does."""
        _allocator().wake_up(tags)
        if tags is None or "weights" in tags:
            self._put_buffers_back()

    def tests_discard_pools(self, *tags: str) -> None:
        """Give parts back without a copy, one by one."""
        _allocator().discard(tags)

    def tests_sleep_worker(self, level: int) -> None:
        """Sleep by the worker's backend, as ROLL's `offload_states` does."""
        self._keep_buffers()
        self._sleep_mode_backend.suspend(level)  # type: ignore[attr-defined]

    def tests_wake_worker(self) -> None:
        """Wake up by the worker's backend, as ROLL's `load_states` does."""
        self._sleep_mode_backend.resume(None)  # type: ignore[attr-defined]
        self._put_buffers_back()

    def tests_sleep_and_fill(self, folder: str, names: list[str] | None) -> None:
        """Lose the weights, get their memory again and load, all in one call."""
        _allocator().sleep(offload_tags=())
        _allocator().wake_up()
        self.tests_load(folder, names)

    def tests_fill_and_sleep(self, folder: str) -> None:
        """Load, and give the memory back with its content kept, all in one call."""
        self.tests_load(folder)
        _allocator().sleep(offload_tags=("weights", "kv_cache"))

    def _keep_buffers(self) -> None:
        """Keep what lies beside the weights and comes with no update."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        self._buffers = {n: buffer.cpu().clone() for n, buffer in model.named_buffers()}

    def _put_buffers_back(self) -> None:
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        for name, buffer in model.named_buffers():
            buffer.copy_(self._buffers[name])


def _allocator() -> Any:
    from vllm import device_allocator

    return device_allocator.get_mem_allocator_instance()
