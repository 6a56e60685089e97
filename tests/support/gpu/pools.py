"""Sleeps that a worker extension makes through vLLM's own allocator; prints JSON.

Usage: python -m tests.support.gpu.pools STAGING OLD NEW

With staging on the `device`, the weights lie in this package's memory, and only the KV
cache is in vLLM's pools. On the `host`, the weights are in the pools too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.support.engines.probe import greedy
from tests.support.engines.script import OPTIONS, tell

EXTENSION = "tests.support.engines.sleeping_extension.SleepingExtension"


def main(staging: str, old: Path, new: Path) -> None:
    from vllm import LLM

    llm: Any = LLM(
        str(old),
        **OPTIONS | {"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True},
        enable_sleep_mode=True,
        worker_extension_cls=EXTENSION,
        weight_transfer_config={"backend": "local"},
        additional_config={"inflight": {"staging": staging}},
    )
    has_arena = staging == "device"
    seen: list[tuple[str, object, object]] = []
    """What was looked at, what was found, and what is right."""

    def see(what: str, found: object, right: object) -> None:
        seen.append((what, found, right))

    def state() -> list[str]:
        info = llm.weight_info()
        return [info["weights"], info["weight_version"]]

    def do(what: str, right: list[str], method: str, *args: object) -> None:
        llm.collective_rpc(method, args=args)
        see(what, state(), right)

    first = greedy(llm)
    llm.update_weights_from_disk(str(new), "new")
    second = greedy(llm)
    see("both versions are alike", first == second, False)

    pools = "weights", "kv_cache"  # and vLLM's other pools, which nobody names
    asleep = "live" if has_arena else "asleep"
    do("all kept, asleep", [asleep, "new"], "tests_sleep_pools", *pools)
    do("all kept, awake", ["live", "new"], "tests_wake_pools")
    see("all kept", greedy(llm), second)

    do("KV lost, asleep", ["live", "new"], "tests_discard_pools", "kv_cache")
    do("KV lost, awake", ["live", "new"], "tests_wake_pools")
    see("KV lost", greedy(llm), second)

    do("weights lost, asleep", [asleep, "new"], "tests_sleep_pools", *pools[1:])
    lost = "live" if has_arena else "gone"
    do("weights lost, awake", [lost, "new"], "tests_wake_pools", ["weights"])
    llm.update_weights_from_disk(str(old), "old")
    do("KV awake after it", ["live", "old"], "tests_wake_pools")
    see("weights lost", greedy(llm), first)

    for way, begin, end in (
        ("backend", "tests_sleep_worker", "tests_wake_worker"),
        ("worker", "sleep", "wake_up"),
    ):
        llm.update_weights_from_disk(str(new), "new")
        for level, after in ((1, "live"), (2, "gone")):
            do(f"{way}, level {level}, asleep", ["asleep", "new"], begin, level)
            do(f"{way}, level {level}, awake", [after, "new"], end)
            if after == "gone":
                llm.update_weights_from_disk(str(new), "new")
            see(f"{way}, level {level}", greedy(llm), second)

    llm.sleep(level=2)
    see("own sleep", state(), ["asleep", "new"])
    do("own sleep, woken inside", ["gone", "new"], "tests_wake_worker")
    llm.update_weights_from_disk(str(old), "old")
    see("own sleep, filled", greedy(llm), first)
    epoch = llm.weight_info()["epoch"]
    for level in (0, 1):
        llm.sleep(level=level)
        llm.wake_up()
        see(f"own level {level}", greedy(llm), first)
    see("epoch after own sleeps", llm.weight_info()["epoch"], epoch)
    tell({"seen": seen})


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1], *map(Path, sys.argv[2:]))
