"""One arm of the GPU benchmark: an engine on the first GPUs, its trainer on the next.

`python -m benchmarks.gpu` starts it as `python -m benchmarks.gpu.arm NAME FOLDER FD`.
Weights arrive over NCCL, in both arms through upstream's trainer interface.
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
from multiprocessing.connection import Connection, Pipe
from typing import Any

from benchmarks.arm import Arm, serve
from benchmarks.record import OURS
from benchmarks.shapes import num_ranks
from vllm.inflight.errors import BaseMismatch

ENGINE = {"max_model_len": 8192, "gpu_memory_utilization": 0.85}


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
            share: of the elements that change, sent as a delta, or whole after the
                word `whole`. Empty: send another version whole.

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
                self.facts = {"commit_ms": reply["gap_ms"], **reply["seconds"]}
            self._pipe.send(error)

    async def _next(self) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._pipe.recv)

    called: float | None = None
    """When the last update made its first call of the engine."""
    facts: dict[str, float] = {}
    """What the engine said about the last commit, and the trainer about its update."""


async def main(name: str, folder: str, handle: str) -> None:
    backend = os.environ["BENCH_BACKEND"] if name == OURS else "nccl"
    trainer = Trainer(backend, folder)
    options = {"inflight": json.loads(os.environ.get("BENCH_INFLIGHT", "{}"))}

    async def update_ours(engine: Any, _: str) -> dict[str, float]:
        await trainer.send(engine)
        return trainer.facts

    async def update_upstream(engine: Any, _: str) -> dict[str, float]:
        await engine.pause_generation(mode="keep", clear_cache=False)
        await trainer.send(engine)
        await engine.resume_generation()
        return {}

    try:
        arm = Arm(
            folder,
            update_ours if name == OURS else update_upstream,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=num_ranks(folder),
            **(ENGINE | json.loads(os.environ.get("BENCH_ENGINE", "{}"))),
            additional_config=options if name == OURS else {},
            weight_transfer_config={"backend": backend},
        )
        await trainer.join(arm.engine)
        await serve(arm, Connection(int(handle)))
    finally:
        trainer.end()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
