"""An engine in this process with two ranks, one of which fails: prints JSON.

Usage: python -m tests.support.engines.failing_ranks OLD NEW

A client of an engine in another process gets the text of an error alone. Here its type
is seen as well.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from tests.support.engines import user_extension
from tests.support.engines.probe import greedy
from tests.support.engines.script import tell
from vllm.inflight.errors import EngineFault, InflightError
from vllm.inflight.worker.worker_state import WorkerState


class Failing(user_extension.Extension):
    """`worker_extension_cls`: fails on the second rank, once it is told to."""

    rank: int

    def tests_hold_on(self, is_held: bool) -> None:
        """Have a transfer of this rank let go of nothing, or let go again."""

        def fail() -> None:
            raise EngineFault("a transfer of a test has not let go")

        if self.rank == 1:
            stager: Any = WorkerState.of(self).require_stager()
            if is_held:
                stager.let_go = fail
            else:
                del stager.let_go

    def tests_put_nothing_back(self) -> None:
        """Have the next attempt to put layers back fail on this rank."""
        from vllm.inflight.worker.model import layerwise_reload

        leave = layerwise_reload.leave

        def fail(model: Any) -> None:
            layerwise_reload.leave = leave
            raise RuntimeError("not put back")

        if self.rank == 1:
            layerwise_reload.leave = fail


def main(old: str, new: str) -> None:
    from vllm import LLM

    llm = LLM(
        old,
        tensor_parallel_size=2,
        max_model_len=512,
        block_size=32,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=True,
        worker_extension_cls=f"{Failing.__module__}.{Failing.__qualname__}",
    )
    core = llm.llm_engine.engine_core.engine_core

    def failure(act: Callable[[], Any]) -> list[str]:
        """The type, the code and the text of the error that a call raises."""
        try:
            act()
        except Exception as error:
            code = error.code if isinstance(error, InflightError) else ""
            return [type(error).__name__, code, str(error)]
        return []

    def facts() -> Any:
        info = llm.weight_info()
        return [info["weight_version"], info["weights"]]

    llm.update_weights_from_disk(new, "new")
    seen: dict[str, Any] = {"new": greedy(llm)}
    llm.update_weights_from_disk(old, "old")
    served = [facts(), llm.collective_rpc("compute_weight_checksums"), greedy(llm)]
    llm.collective_rpc("tests_hold_on", args=(True,))
    calls: dict[str, Callable[[], Any]] = {
        "reload": lambda: core.collective_rpc("reload_weights"),
        "sleep": lambda: core.sleep(1),
    }
    for name, act in calls.items():
        seen[name] = failure(act)
        now = [facts(), llm.collective_rpc("compute_weight_checksums"), greedy(llm)]
        seen[f"{name} has changed nothing"] = now == served
    llm.collective_rpc("tests_hold_on", args=(False,))

    llm.collective_rpc("tests_put_nothing_back")
    seen["breaks off"] = failure(lambda: llm.collective_rpc("tests_start_and_fail"))
    seen["after breaking off"] = facts()
    seen["goes on"] = failure(llm.continue_generation)
    llm.update_weights_from_disk(new, "new again")
    seen["healed"] = facts(), greedy(llm)
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(sys.argv[1], sys.argv[2])
