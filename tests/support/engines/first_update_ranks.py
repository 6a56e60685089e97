"""The first update of two ranks, run as a script: prints what happened as JSON.

Usage: python -m tests.support.engines.first_update_ranks OLD NEW OPTIONS

OPTIONS of the engines are JSON.
"""

import json
import os
import sys
from typing import Any

from tests.support.engines.probe import checksums, greedy
from tests.support.engines.script import OPTIONS, tell


def main(old: str, new: str, options: str) -> None:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    def start(folder: str) -> Any:
        return LLM(
            folder,
            tensor_parallel_size=2,
            weight_transfer_config=WeightTransferConfig(backend="local"),
            worker_extension_cls="tests.support.engines.mirrored_ranks.Mirrored",
            **(OPTIONS | json.loads(options)),
        )

    seen: dict[str, Any] = {}
    llm = start(new)
    seen["fresh"] = greedy(llm), checksums(llm)
    llm.llm_engine.engine_core.shutdown()
    llm = start(old)
    seen["before"] = greedy(llm), checksums(llm)
    seen["num_proved"] = llm.collective_rpc("tests_num_proved")
    llm.update_weights_from_disk(new, "new")
    seen["updated"] = greedy(llm), checksums(llm)
    seen["num_loaded"] = llm.collective_rpc("tests_num_loaded")
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(*sys.argv[1:])
