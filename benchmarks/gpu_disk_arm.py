"""One arm of the benchmark of updates from files; started by benchmarks/gpu_disk.py.

`python -m benchmarks.gpu_disk_arm NAME FOLDER FD`.
"""

from __future__ import annotations

import asyncio
import sys
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.arm import WAYS, Arm, serve
from benchmarks.record import OURS, UPSTREAM

HOST = "ours, staged on the host"
STAGING = {OURS: "device", HOST: "host"}
KV_BYTES = 12 << 30


async def reload(engine: Any, checkpoint: str) -> dict[str, float]:
    """Upstream's way from files: its worker's own loader, in a pause."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    await engine.resume_generation()
    return {}


async def main(name: str, folder: str, handle: str) -> None:
    options: dict[str, Any] = {}
    if name in STAGING:
        options["additional_config"] = {"inflight": {"staging": STAGING[name]}}
    arm = Arm(
        folder,
        reload if name == UPSTREAM else WAYS[OURS][1],
        dtype="bfloat16",
        max_model_len=8192,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=KV_BYTES,
        **options,
    )
    await serve(arm, Connection(int(handle)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
