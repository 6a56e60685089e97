"""One rank of two under an external launcher, run as a script: prints what happened.

Whoever starts it sets what such a launcher sets: RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT.

Usage: python -m tests.engine.launched OLD NEW
"""

import os
import sys

from tests.engine.probe import greedy
from tests.engine.script import OPTIONS, tell
from vllm.inflight.errors import InflightError


def main(old: str, new: str) -> None:
    from vllm import LLM

    llm = LLM(
        old,
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        seed=0,
        # Should an update be taken, nobody else would ever agree to it.
        additional_config={"inflight": {"update_deadline_s": 10}},
        **OPTIONS,
    )
    before, code = greedy(llm), "committed"
    try:
        llm.update_weights_from_disk(new, "new")
    except InflightError as error:
        code = error.code
    tell({"before": before, "code": code, "after": greedy(llm)})


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
