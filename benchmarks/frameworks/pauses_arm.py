"""One arm of the benchmark of frameworks' pauses: an engine, and how they update it.

`python -m benchmarks.frameworks.pauses_arm NAME CHECKPOINT FD`, started by
benchmarks/frameworks/pauses.py. NAME is a value of `--inflight-pauses`. A checkpoint of
a plan is written `FRAMEWORK=FOLDER`: the arm then makes the calls of this framework.
Pause, update calls and continue have the arguments that the framework's trainer uses,
but where an argument tells of tensors: there it names the folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.arm import Arm, serve
from benchmarks.frameworks.arm import ENGINE
from benchmarks.frameworks.pauses_worker import (
    BACKEND,
    SENT,
    Extension,
    buckets,
    names_of,
)
from benchmarks.frameworks.served import served_bits


async def trl(engine: Any, folder: str) -> None:
    """AsyncGRPO and AsyncDistillation: vLLM's phases; their pause clears the cache."""
    await engine.pause_generation(mode="keep")
    await engine.start_weight_update(is_checkpoint_format=True)
    await engine.update_weights({"update_info": {"file": folder}})
    await engine.finish_weight_update()
    await engine.resume_generation()


async def openrlhf(engine: Any, folder: str) -> None:
    """Partial rollouts: a pause around one call for each parameter."""
    names = names_of(folder)
    await engine.pause_generation(mode="keep")
    await engine.reset_prefix_cache()
    for name in names:
        args = name, folder, (), name == names[-1]  # the folder in place of a dtype
        await engine.collective_rpc("update_weight", args=args)
    await engine.resume_generation()


async def prime_rl(engine: Any, folder: str) -> None:
    """The orchestrator's `/pause?mode=keep&clear_cache=false`, `/update_weights`."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("update_weights_from_path", args=(folder,))
    await engine.resume_generation()


async def skyrl(engine: Any, folder: str) -> None:
    """A begin, four chunks and an end, inside of a pause that keeps the cache."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("skyrl_start_weight_update")
    for names in buckets(names_of(folder)):
        info = {"folder": folder, "names": names}
        await engine.collective_rpc("update_weights_nccl", args=(info,))
    await engine.collective_rpc("skyrl_finish_weight_update")
    await engine.resume_generation()


async def pipelinerl(engine: Any, folder: str) -> None:
    """The steps of its server's `receive_weight_update`."""
    asked = json.dumps({"folder": folder})
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("receive_weight_update", args=(asked,))
    await engine.resume_generation()


async def ms_swift(engine: Any, folder: str) -> None:
    """Its rollout server: buckets, an end, the cache. It does not pause."""
    for names in buckets(names_of(folder)):
        told = [{"name": name, "dtype": folder} for name in names]
        await engine.collective_rpc("update_flattened_params", args=(told,))
    await engine.collective_rpc("process_weights_after_loading")
    await engine.reset_prefix_cache()


async def checkpoint_engine(engine: Any, folder: str) -> None:
    """Its one worker call; it does not pause."""
    handles = {"folder": folder}
    await engine.collective_rpc("update_weights_from_ipc", args=(handles,))


async def nemo_rl(engine: Any, folder: str) -> None:
    """Its one worker call with `in_flight_weight_updates`, which does not pause."""
    Path(os.environ[SENT]).write_text(folder)
    await engine.collective_rpc("update_weights_from_collective")


SEQUENCES: dict[str, Callable[[Any, str], Awaitable[None]]] = {
    "TRL": trl,
    "OpenRLHF": openrlhf,
    "prime-rl": prime_rl,
    "SkyRL": skyrl,
    "PipelineRL": pipelinerl,
    "ms-swift": ms_swift,
    "checkpoint-engine": checkpoint_engine,
    "NeMo-RL": nemo_rl,
}
"""Framework → its calls for one update. Those that retract come first, while streams
are short: they are prefilled again, which takes the longer the longer they are. Those
that do not pause come last: both arms do the same there."""
UNPAUSED = ("ms-swift", "checkpoint-engine", "NeMo-RL")
"""Those that do not pause."""


async def update(engine: Any, named: str) -> dict[str, float]:
    """One update, by the calls of the framework that `named` begins with."""
    framework, _, folder = named.partition("=")
    await SEQUENCES[framework](engine, folder)
    return {}


async def main(name: str, checkpoint: str, handle: str) -> None:
    with tempfile.NamedTemporaryFile() as sent:
        os.environ[SENT] = sent.name  # workers inherit it
        arm = Arm(
            checkpoint,
            update,
            served=served_bits,
            worker_extension_cls=f"{Extension.__module__}.{Extension.__name__}",
            weight_transfer_config={"backend": BACKEND},
            additional_config={"inflight": {"pauses": name}},
            **json.loads(os.environ[ENGINE]),
        )
        await serve(arm, Connection(int(handle)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
