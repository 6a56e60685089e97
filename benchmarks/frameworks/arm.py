"""One arm of the benchmark of frameworks' updates: an engine, and its trainer.

`python -m benchmarks.frameworks` starts it as `python -m benchmarks.frameworks.arm NAME
FOLDER FD`. Worker extension and transport are those of the framework's package.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.arm import Arm, serve
from benchmarks.frameworks.served import served_bits
from benchmarks.frameworks.trainer import SENDERS, TrainerProcess, Version
from benchmarks.gpu.watch import profile
from benchmarks.record import OURS
from benchmarks.shapes import num_ranks

FRAMEWORK, ENGINE = "BENCH_FRAMEWORK", "BENCH_ENGINE"
"""In the environment: a key of `SENDERS`, and options of the engine as JSON."""
IN_PAUSE, WITHOUT_PAUSE = "in a pause", "without a pause"
"""How an update is made; in place of a checkpoint of a plan."""
PROFILED = "profiled "
"""Before such a way: the staging thread is profiled."""


async def main(name: str, folder: str, handle: str) -> None:
    framework = os.environ[FRAMEWORK]
    sender = SENDERS[framework]
    loop = asyncio.get_running_loop()
    trainer = TrainerProcess(framework, folder, num_ranks(folder))
    engine: Any = None

    def call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = engine.collective_rpc(method, args=args, kwargs=kwargs)
        return asyncio.run_coroutine_threadsafe(made, loop).result()

    async def update(engine: Any, way: str) -> dict[str, Any]:
        if way.startswith(PROFILED):
            await engine.collective_rpc(profile.begin)
            await update(engine, way.removeprefix(PROFILED))
            return {"found": (await engine.collective_rpc(profile.end))[0]}
        if way == IN_PAUSE:
            await engine.pause_generation(**sender.pause)
        await loop.run_in_executor(None, trainer.carry_out, Version(), call)
        if way == IN_PAUSE:
            await engine.resume_generation()
        return {}

    try:
        # vLLM measures how much of the GPU is free, which trainers may share with it.
        await loop.run_in_executor(None, trainer.ready)
        ours = {"additional_config": {"inflight": {"pauses": "absorb"}}}
        arm = Arm(
            folder,
            update,
            served=served_bits,
            load_format="auto" if sender.reads_files else "dummy",
            dtype="bfloat16",
            tensor_parallel_size=num_ranks(folder),
            worker_extension_cls=f"benchmarks.frameworks.extensions.{sender.package}",
            **json.loads(os.environ[ENGINE]),
            **(ours if name == OURS else {}),
        )
        engine = arm.engine
        await loop.run_in_executor(None, trainer.join, call)
        await serve(arm, Connection(int(handle)))
    finally:
        trainer.end()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
