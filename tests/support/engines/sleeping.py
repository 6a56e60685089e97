"""A sleep for the CPU build, whose own gives nothing back: the KV cache loses its KV.

`python -m tests.support.engines.sleeping serve …` is `vllm serve` with it, which takes
`--enable-sleep-mode`. The weights keep their memory; tests/gpu gives back theirs.
"""

import runpy
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm.inflight.engine.pause.sleep import Sleep

LOST = 7.0
"""What is read in the place of KV that is lost."""


def discard(worker: Any, tags: Any) -> None:
    """Lose the KV, if it is among `tags`."""
    if "kv_cache" in tags:
        for cache in worker.model_runner.kv_caches:
            cache.fill_(LOST)


def sleep(worker: Any, level: int = 1) -> None:
    """Lose the KV; the weights stay."""
    discard(worker, ("weights", "kv_cache"))


CHANGES: list[tuple[Any, str, Any]] = [
    (CPUWorker, "discard", discard),
    (CPUWorker, "sleep", sleep),
    (CPUWorker, "wake_up", lambda worker, tags=None: None),
    (type(current_platform), "is_sleep_mode_available", lambda _: True),
    (Sleep, "gives_weights_alone", True),
]

if __name__ == "__main__":
    for owner, name, value in CHANGES:
        setattr(owner, name, value)
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
