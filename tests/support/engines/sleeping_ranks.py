"""An engine in this process with two ranks that sleep one by one: prints JSON.

Usage: python -m tests.support.engines.sleeping_ranks OLD
"""

import os
import sys
from typing import Any

import pytest

from tests.support.engines.bare_core import Streams, add, prompt
from tests.support.engines.pools_on_host import Pools
from tests.support.engines.script import tell
from tests.support.engines.sleeping_extension import SleepingExtension


class SleepingRank(SleepingExtension):
    """`worker_extension_cls`: sleeps and wakes up on one rank alone."""

    rank: int

    def tests_hold_pools(self) -> None:
        """Have the memory of this rank in upstream's pools."""
        Pools(pytest.MonkeyPatch()).hold(self)

    def tests_sleep_rank(self, rank: int) -> None:
        """Give all memory of a rank back; its content is kept."""
        if rank == self.rank:
            self.tests_sleep_pools("weights", "kv_cache")

    def tests_wake_rank(self, rank: int) -> None:
        """Get it again."""
        if rank == self.rank:
            self.tests_wake_pools()


def main(old: str) -> None:
    from vllm import LLM

    llm = LLM(
        old,
        tensor_parallel_size=2,
        max_model_len=512,
        block_size=32,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=True,
        worker_extension_cls=f"{SleepingRank.__module__}.{SleepingRank.__qualname__}",
    )
    core = llm.llm_engine.engine_core.engine_core
    llm.collective_rpc("tests_hold_pools")

    def facts() -> Any:
        executor = core.model_executor
        return llm.weight_info()["weights"], sorted(executor.sleeping_tags)

    add(core, "expected", prompt(3))
    seen: dict[str, Any] = {"expected": Streams(core).run().tokens["expected"]}
    add(core, "waits", prompt(3))
    streams = Streams(core).step(2)
    for step, (what, rank) in enumerate(
        [("sleep", 1), ("sleep", 0), ("wake", 0), ("wake", 1)]
    ):
        llm.collective_rpc(f"tests_{what}_rank", args=(rank,))
        sampled = len(streams.tokens["waits"])
        streams.step(2)
        seen[str(step)] = facts(), len(streams.tokens["waits"]) - sampled
    seen["waits"] = streams.run().tokens["waits"]
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(sys.argv[1])
