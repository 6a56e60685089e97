"""Experts shared out over two ranks, run as a script: prints JSON.

Usage: python -m tests.support.engines.shared_experts OLD NEW SHORT ODD

Upstream's CPU kernel does not take a share of the experts (it segfaults), so nothing is
generated here: what would be served is told by the checksums of both ranks.
"""

import os
import sys
from pathlib import Path
from typing import Any

from tests.support.engines.script import OPTIONS, tell
from tests.support.engines.two_ranks_routes import Client
from tests.support.route_stub import caller, served
from vllm.inflight.errors import WeightsMismatch


def main(*folders: Path) -> None:
    from vllm import LLM

    def start(folder: Path) -> Any:
        return LLM(
            str(folder),
            tensor_parallel_size=2,
            enable_expert_parallel=True,
            **OPTIONS,
        )

    def post(path: str, **body: Any) -> Any:
        door = caller(served(Client(llm)))
        return door.post(path, json=body).json()

    def checksums() -> list[Any]:
        ranks = post("/weights_checker")["ranks"]
        return [rank["checksums"] for rank in ranks]

    def unread(name: str) -> Any:
        """The error that a read of one tensor is answered with."""
        return post("/get_weights_by_name", name=name)["error"]

    def refused(folder: Path) -> list[str]:
        try:
            llm.update_weights_from_disk(str(folder))
        except WeightsMismatch as error:
            return [str(error), *error.tensors]
        raise AssertionError(f"{folder} was accepted")

    old, new, short, odd = folders
    llm = start(new)
    seen: dict[str, Any] = {"fresh": checksums()}
    llm.llm_engine.engine_core.shutdown()
    llm = start(old)
    seen["before"] = checksums()
    experts = [n for n in seen["before"][0] if n.endswith(("w13_weight", "w2_weight"))]
    seen["unread"] = {name: unread(name) for name in experts}
    for _ in range(2):
        llm.update_weights_from_disk(str(new), "new")
        seen["after commit"] = checksums()
        llm.rollback_weights()
        seen["after rollback"] = checksums()
    seen["short"] = refused(short)
    seen["odd"] = refused(odd)
    seen["after refusals"] = checksums()
    llm.llm_engine.engine_core.shutdown()
    tell(seen)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    main(*map(Path, sys.argv[1:]))
