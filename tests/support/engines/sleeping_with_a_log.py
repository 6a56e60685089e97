"""A sleep for CPU engines with delta staging, as on a GPU.

The CPU build gives no memory back. So here a sleep gives the log back, and level 2
overwrites the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm.inflight.worker.sleep import SleepBackend


@contextmanager
def sleeping_with_a_log() -> Iterator[list[str]]:
    """Context: the log loses its memory in a sleep, and level 2 loses the weights.

    Yields what upstream's allocator was asked for.
    """
    asked: list[str] = []
    allocator = SimpleNamespace(
        sleep=lambda offload_tags: asked.append(f"sleep {offload_tags[0]}"),
        wake_up=lambda tags: asked.append(f"wake {tags}"),
    )

    def backend(worker: Any) -> SleepBackend:
        return SleepBackend(worker.vllm_inflight.stager, None)

    def sleep(worker: Any, level: int = 1) -> None:
        backend(worker).suspend(level)
        for param in worker.model_runner.get_model().parameters():
            param.data.fill_(7.0) if level == 2 else None

    with pytest.MonkeyPatch.context() as patched:
        place = "vllm.device_allocator.get_mem_allocator_instance"
        patched.setattr(place, lambda: allocator)
        patched.setattr(CPUWorker, "sleep", sleep)
        patched.setattr(
            CPUWorker, "wake_up", lambda worker, tags=None: backend(worker).resume(tags)
        )
        yield asked
