"""A family on two ranks, run as a script: ends well if it equals fresh engines.

Usage: python -m tests.support.engines.family_ranks FAMILY OLD NEW, the last two are
    folders.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.engines.mixtures import equals_fresh_engines
from tests.support.engines.script import OPTIONS, tell
from tests.support.models.families import cpu_options


def main(family: str, old: str, new: str) -> None:
    alive: list[Any] = []

    def start(folder: Path) -> Any:
        from vllm import LLM

        stop()
        options = OPTIONS | cpu_options(family)
        options["worker_extension_cls"] = "tests.support.engines.oracle.Oracle"
        alive.append(LLM(str(folder), tensor_parallel_size=2, **options))
        return alive[-1]

    def stop() -> None:
        while alive:
            alive.pop().llm_engine.engine_core.shutdown()

    with tempfile.TemporaryDirectory() as root:
        equals_fresh_engines(
            start, (Path(old), Path(new)), family, Path(root), rounds=2
        )
    stop()
    tell({"equal": True})


if __name__ == "__main__":
    # All prompts are there before the first step: kernels of some families say
    # something else for a prompt that is alone in it (docs/models.md).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(*sys.argv[1:])
