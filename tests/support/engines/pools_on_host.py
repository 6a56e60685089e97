"""Upstream's memory pools on a CPU engine: what sleeps there loses its content.

Upstream's allocator needs a GPU. Here its own code runs, and what it asks of the driver
is done to host memory: memory that is given back is overwritten.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import device_allocator
from vllm.device_allocator import cumem

from tests.support.engines.sleeping import LOST
from vllm.inflight.patch import sleep
from vllm.inflight.patch.records.record import apply
from vllm.inflight.worker.integrity.pool_watch import watch_pools

LOST_WORD = torch.tensor([LOST]).view(torch.int32).item()


class Pools:
    """Upstream's allocator with the memory of a CPU engine; no other engine uses it.

    Args:
        patch: undoes it in the end.

    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        for record in sleep.PATCHES:
            if record.target.startswith(f"{cumem.__name__}:"):
                apply(record)
        self._allocator = cumem.CuMemAllocator()
        self._worker: Any = None
        self.others: dict[str, torch.Tensor] = {}
        """What lies in other pools, by the tag of the pool."""
        driver = SimpleNamespace(cudaMemcpy=ctypes.memmove)
        patch.setattr(cumem, "libcudart", driver)
        patch.setattr(cumem, "PIN_MEMORY", False)
        patch.setattr(cumem, "create_and_map", lambda handle: None)
        patch.setattr(cumem, "unmap_and_release", _overwrite)
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
        patch.setattr(device_allocator, "get_mem_allocator_instance", self.allocator)

    def hold(self, worker: Any) -> None:
        """Hold the memory of a worker, as if it had been allocated here."""
        self._worker = worker
        watch_pools(worker)

    def release(self) -> None:
        """Hold the memory of no worker."""
        self._worker = None

    def allocator(self) -> Any:
        """Upstream's allocator, which knows where the memory lies now.

        On a CPU, a commit may exchange the memory of two sets of weights.
        """
        allocated = self._allocator.pointer_to_data
        for place in [place for place, of in allocated.items() if not of.is_asleep]:
            del allocated[place]
        asleep = {of.tag for of in allocated.values()}
        tags = {"weights", "kv_cache", *self.others} if self._worker else set()
        for tag in tags - asleep:
            self._allocator.current_tag = tag
            for tensor in self._tensors(tag):
                memory = tensor.untyped_storage()
                if not memory.nbytes():
                    continue  # of a weight that is packed
                handle = 0, memory.nbytes(), memory.data_ptr(), 0
                self._allocator._python_malloc_callback(handle)
        return self._allocator

    def _tensors(self, tag: str) -> list[torch.Tensor]:
        if tag in self.others:
            return [self.others[tag]]
        runner = self._worker.model_runner
        if tag == "kv_cache":
            return list(runner.kv_caches)
        return [param.data for param in runner.get_model().parameters()]


def _overwrite(handle: Any) -> None:
    _, size, place, _ = handle
    words = (ctypes.c_int32 * (size // 4)).from_address(place)
    torch.frombuffer(words, dtype=torch.int32).fill_(LOST_WORD)
