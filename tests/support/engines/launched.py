"""One process of two under an external launcher, run as a script: prints what happened.

Whoever starts it sets what such a launcher sets: RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. The two are one engine of two ranks, or two engines.

Usage: python -m tests.support.engines.launched OLD NEW RANKS_OF_AN_ENGINE
"""

import os
import sys
from typing import Any

import torch

from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell
from vllm.inflight.errors import InflightError


def main(old: str, new: str, num_ranks: str) -> None:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    if int(num_ranks) == 1:
        # A trainer in each process has done so; vLLM would open a group of one rank,
        # as the second of which no process can join.
        torch.distributed.init_process_group("gloo")
    llm = LLM(
        old,
        tensor_parallel_size=int(num_ranks),
        distributed_executor_backend="external_launcher",
        seed=0,
        weight_transfer_config=WeightTransferConfig(backend="local"),
        # Should an update be taken, nobody else would ever agree to it.
        additional_config={"inflight": {"update_deadline_s": 10}},
        **OPTIONS,
    )
    seen: dict[str, Any] = {"before": greedy(llm), "code": "committed"}
    try:
        llm.update_weights_from_disk(new, "new")
    except InflightError as error:
        tell(seen | {"code": error.code, "after": greedy(llm)})
        return
    seen["after"] = greedy(llm)
    (read,) = llm.collective_rpc("inflight_read", args=("checksums", ()))
    seen["ranks"] = read["ok"]["parallelism_info"]
    llm.rollback_weights()
    seen["rolled back"] = greedy(llm)
    # An entry for each rank of the engine, and one for each process of the launcher.
    both = [{"path": path} for path in (new, old)]
    seen["lists"] = []
    for entries in ([{"path": new}], both):
        llm.start_weight_update()
        llm.update_weights({"update_info": entries})
        llm.finish_weight_update()
        seen["lists"].append(greedy(llm))
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
