"""One arm of the GPU benchmark: an engine on the first GPUs, its trainer on the next.

`python -m benchmarks.gpu` and `python -m benchmarks.gpu.delta` start it as
`python -m benchmarks.gpu.arm NAME FOLDER FD`. In every arm weights arrive through
upstream's trainer interface.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from math import prod
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from benchmarks.arm import Arm, serve
from benchmarks.gpu.watch import blocks, profile, trace
from benchmarks.record import UPSTREAM
from benchmarks.shapes import SAVES, num_ranks
from vllm.inflight.errors import BaseMismatch

ENGINE = {"max_model_len": 8192, "gpu_memory_utilization": 0.85}
ON_HOST = {
    "enforce_eager": True,
    # Delta staging needs weights that lie as they do on a GPU.
    "worker_extension_cls": "tests.support.engines.unpacked_ranks.Unpacked",
}
"""Further options without a GPU: the benchmark can be tried out there."""
ROLLBACK = "rollback"
"""In place of a share of a plan: the engine goes back to the version before."""
VERIFY = "verify"
"""Likewise: what is served is compared with the digest of its label."""
TRACED = "traced "
"""Before a share: the update is traced."""
PROFILED = "profiled "
"""Before a share: the staging thread is profiled."""
KEPT = "kept "
"""Before a share: torch is asked what it keeps of the GPU's memory."""
OFF = "off"
"""Name of the arm that is never updated: it has one set of weights."""
AROUND_S = 0.1
"""Traced before such an update, and after it."""


class Trainer:
    """The connection to the trainer: sends it commands, and receives its calls."""

    def __init__(self, backend: str, folder: str) -> None:
        self._is_ready = False
        self._pipe, far = Pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.gpu.trainer"),
                *(backend, folder, str(far.fileno())),
            ],
            pass_fds=[far.fileno()],
            start_new_session=True,
        )
        far.close()

    async def ready(self) -> None:
        """Wait until its weights are made, and saved if they are to be."""
        if not self._is_ready:
            await self._next()
            self._is_ready = True

    async def join(self, engine: Any) -> None:
        """Let trainer and engine join their group."""
        await self.ready()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipe.send(port)
        await self._attend(engine)

    async def send(self, engine: Any, share: str = "") -> None:
        """Send a new version; return when it is live.

        Args:
            engine: to send it to.
            share: of the elements that change, sent as a delta; or whole after the
                word `whole`, or as the trainer decides after `auto`. Empty: send
                another version whole.

        """
        self._pipe.send(share or "send")
        await self._attend(engine)

    def end(self) -> None:
        """End the process."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def _attend(self, engine: Any) -> None:
        """Answer the trainer's calls until it is done."""
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        self.called = None
        while True:
            method, payload = await self._next()
            self.called = self.called or time.monotonic()
            if method == "done":
                self.facts = self.facts | (payload or {})
                return
            error: BaseMismatch | None = None
            reply: Any = None
            try:
                if method == "init_weight_transfer_engine":
                    await engine.init_weight_transfer_engine(
                        WeightTransferInitRequest(payload)
                    )
                elif method == "update_weights":
                    update_info, options = payload
                    reply = await engine.update_weights(
                        WeightTransferUpdateRequest(update_info), **options
                    )
                elif payload is not None:
                    await engine.start_weight_update(manifest=payload)
                else:
                    reply = await getattr(engine, method)()
            except BaseMismatch as mismatch:
                error = mismatch  # the trainer then sends the whole version
            if isinstance(reply, dict) and "gap_ms" in reply:
                self.facts = commit_facts(reply)
            self._pipe.send(error)

    async def _next(self) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._pipe.recv)

    called: float | None = None
    """When the last update made its first call of the engine."""
    facts: dict[str, float] = {}
    """What the engine said about the last commit, and the trainer about its update."""


def commit_facts(reply: dict[str, Any]) -> dict[str, float]:
    """What the reply of a commit tells of its time.

    Of several engines: the longest gap, and how far apart the first and the last of
    them have committed. The phases are those of the first engine.
    """
    each = reply.get("engines", [reply])
    facts = {"commit_ms": max(one["gap_ms"] for one in each), **reply["seconds"]}
    if len(each) > 1:
        at = [one["committed_at"] for one in each]
        facts["skew_ms"] = 1e3 * (max(at) - min(at))
    return facts


async def main(name: str, folder: str, handle: str) -> None:
    is_ours = name != UPSTREAM
    backend = os.environ["BENCH_BACKEND"] if is_ours else "nccl"
    trainer = Trainer(backend, folder)
    given = ENGINE | ({} if torch.cuda.is_available() else ON_HOST)
    given |= json.loads(os.environ.get("BENCH_ENGINE", "{}"))
    if num_ranks(folder) > 1:
        # Without a GPU each rank has a core; else vLLM asks for a NUMA node for each.
        cores = sorted(os.sched_getaffinity(0)) * num_ranks(folder)
        bound = "|".join(map(str, cores[: num_ranks(folder)]))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound
    if is_ours:
        inflight = json.loads(os.environ.get("BENCH_INFLIGHT", "{}"))
        given["additional_config"] = {"inflight": inflight}
    # What GPUs are left for tensor parallelism.
    others = ("data_parallel_size", "pipeline_parallel_size")
    ranks = num_ranks(folder) // prod(given.get(each, 1) for each in others)

    async def update_ours(engine: Any, share: str) -> dict[str, Any]:
        if share == ROLLBACK:
            return {"commit_ms": (await engine.rollback_weights())["gap_ms"]}
        if share == VERIFY:
            return {"is_equal": (await engine.verify_weights())["result"] == "equal"}
        for prefix, tool in ((TRACED, trace), (PROFILED, profile), (KEPT, blocks)):
            if share.startswith(prefix):
                return await watched(engine, share.removeprefix(prefix), tool)
        await trainer.send(engine, share)
        # A share is changed, and searched for, before the engine is called.
        assert trainer.called is not None
        return trainer.facts | ({"called": trainer.called} if share else {})

    async def watched(engine: Any, share: str, tool: Any) -> dict[str, Any]:
        await engine.collective_rpc(tool.begin)
        await asyncio.sleep(AROUND_S)
        facts = await update_ours(engine, share)
        await asyncio.sleep(AROUND_S)
        (found,) = await engine.collective_rpc(tool.end)
        return facts | {"found": found}

    async def update_upstream(engine: Any, share: str) -> dict[str, float]:
        await engine.pause_generation(mode="keep", clear_cache=False)
        await trainer.send(engine, share)
        await engine.resume_generation()
        return {}

    try:
        if os.environ.get(SAVES):
            await trainer.ready()
        arm = Arm(
            folder,
            update_ours if is_ours else update_upstream,
            load_format="auto" if os.environ.get(SAVES) else "dummy",
            dtype="bfloat16",
            tensor_parallel_size=ranks,
            weight_transfer_config=None if name == OFF else {"backend": backend},
            **given,
        )
        if name != OFF:
            await trainer.join(arm.engine)
        await serve(arm, Connection(int(handle)))
    finally:
        trainer.end()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
