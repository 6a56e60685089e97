"""One arm of the benchmark of frameworks' pauses: an engine, and how they update it.

`python -m benchmarks.frameworks.pauses_arm NAME CHECKPOINT FD`, started by
benchmarks/frameworks/pauses.py. NAME is a value of `--inflight-pauses`. A checkpoint of
a plan is written `FRAMEWORK=FOLDER`: the arm then makes the calls of this framework.
Pause, update calls and continue have the arguments that the framework's trainer uses.
The tensors come from the file in place of a trainer's group.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.arm import Arm, serve

FILE = "model.safetensors"


class Extension:
    """The worker calls of the frameworks, as their own extensions name them."""

    # OpenRLHF: one call for each parameter.
    def update_weight(
        self: Any, name: str, dtype: Any, shape: Any, empty_cache: bool = False
    ) -> None:
        weight = tensors_of(dtype)[name]
        self.model_runner.model.load_weights(weights=[(name, weight)])

    # prime-rl: one call with a folder.
    def update_weights_from_path(self: Any, weight_dir: str) -> None:
        found = load_file(f"{weight_dir}/{FILE}")
        self.model_runner.model.load_weights(weights=iter(found.items()))

    # SkyRL: a begin, chunks, and an end.
    def skyrl_start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
        """Do nothing: an adopted call begins an update without it."""

    def update_weights_nccl(self: Any, update_info: dict[str, Any]) -> None:
        found = tensors_of(update_info["folder"])
        chosen = [(name, found[name]) for name in update_info["names"]]
        self.model_runner.model.load_weights(weights=chosen)

    def skyrl_finish_weight_update(self: Any) -> None:
        """Do nothing: it marks the end."""

    # PipelineRL: one call with a request.
    def receive_weight_update(self: Any, request_json: str) -> None:
        for name, tensor in tensors_of(json.loads(request_json)["folder"]).items():
            self.model_runner.model.load_weights(weights=[(name, tensor)])


@cache
def tensors_of(folder: str) -> dict[str, Any]:
    """The tensors of a checkpoint; read once, as a trainer has them in memory."""
    found: dict[str, Any] = load_file(f"{folder}/{FILE}")
    return found


@cache
def names_of(folder: str) -> list[str]:
    """The names of a checkpoint's tensors."""
    with safe_open(f"{folder}/{FILE}", "pt") as file:
        return list(file.keys())


async def trl(engine: Any, folder: str) -> None:
    """AsyncGRPO and AsyncDistillation: vLLM's phases; their pause clears the cache."""
    await engine.pause_generation(mode="keep")
    await engine.start_weight_update(is_checkpoint_format=True)
    await engine.update_weights({"update_info": {"path": folder}})
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
    names = names_of(folder)
    size = -(-len(names) // 4)
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("skyrl_start_weight_update")
    for start in range(0, len(names), size):
        info = {"folder": folder, "names": names[start : start + size]}
        await engine.collective_rpc("update_weights_nccl", args=(info,))
    await engine.collective_rpc("skyrl_finish_weight_update")
    await engine.resume_generation()


async def pipelinerl(engine: Any, folder: str) -> None:
    """The steps of its server's `receive_weight_update`."""
    asked = json.dumps({"folder": folder})
    await engine.pause_generation(mode="keep", clear_cache=False)
    await engine.collective_rpc("receive_weight_update", args=(asked,))
    await engine.resume_generation()


SEQUENCES: dict[str, Callable[[Any, str], Awaitable[None]]] = {
    "TRL": trl,
    "OpenRLHF": openrlhf,
    "prime-rl": prime_rl,
    "SkyRL": skyrl,
    "PipelineRL": pipelinerl,
}
"""Framework → its calls for one update. Those that retract come first, while streams
are short: they are prefilled again, which takes the longer the longer they are."""


async def update(engine: Any, named: str) -> dict[str, float]:
    """One update, by the calls of the framework that `named` begins with."""
    framework, _, folder = named.partition("=")
    await SEQUENCES[framework](engine, folder)
    return {}


async def main(name: str, checkpoint: str, handle: str) -> None:
    arm = Arm(
        checkpoint,
        update,
        enforce_eager=True,
        worker_extension_cls=f"{Extension.__module__}.{Extension.__name__}",
        weight_transfer_config={"backend": "local"},
        additional_config={"inflight": {"pauses": name}},
    )
    await serve(arm, Connection(int(handle)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
