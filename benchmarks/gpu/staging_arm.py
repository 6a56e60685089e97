"""One arm on one GPU; its name says where its shadow weights are, if it has any.

`python -m benchmarks.gpu.staging_arm NAME FOLDER FD`, started by benchmarks/gpu/disk.py
and benchmarks/gpu/steady.py. The weights are the folder's, or random if it has none.
"""

from __future__ import annotations

import asyncio
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.arm import WAYS, Arm, serve
from benchmarks.record import OURS, UPSTREAM

HOST = "ours, staged on the host"
ALONE = "ours, with one set"
STAGING = {OURS: "device", HOST: "host", ALONE: "off"}
KV_BYTES = 30 << 30


async def reload(engine: Any, checkpoint: str) -> dict[str, float]:
    """Update in upstream's way from files: `reload_weights` in a pause."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    await engine.resume_generation()
    return {}


async def main(name: str, folder: str, handle: str) -> None:
    options: dict[str, Any] = {}
    if name in STAGING:
        options["additional_config"] = {"inflight": {"staging": STAGING[name]}}
    if not any(Path(folder).glob("*.safetensors")):
        options["load_format"] = "dummy"
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
