"""An engine core in a spawned process, run as a script: tells tokens of an `LLM`.

Usage: python -m tests.support.engines.spawned OLD NEW, both are folders.
"""

import os
import sys

from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell


def main(old: str, new: str) -> None:
    from vllm import LLM

    llm = LLM(old, **OPTIONS)
    llm.update_weights_from_disk(new, "new")
    seen = {"new": greedy(llm)}
    llm.rollback_weights()
    tell(seen | {"old": greedy(llm)})
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    main(*sys.argv[1:])
