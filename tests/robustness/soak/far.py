"""A trainer in a process of its own, for an engine on an event loop.

It joins when it is first needed, and again after it was killed.
"""

import asyncio
from pathlib import Path
from typing import Any

import torch

from tests.support.engines.far_trainer import FarTrainer
from vllm.inflight.errors import InflightError

PATIENCE_S = 100.0
LENDS = "inflight_ipc"
FILES = "local"
"""The backend without a trainer's process; `Publisher` needs it."""
OPTIONS = {"bucket_bytes": 1 << 16}
"""So that the tiny model is many buckets."""


def usual_backend() -> str:
    """NCCL where a trainer has a GPU of its own; on one GPU it lends its memory."""
    if not torch.cuda.is_available():
        return FILES
    return "inflight_nccl" if torch.cuda.device_count() > 1 else LENDS


class Calls:
    """What the process asks of the engine, answered by the loop for another thread."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self.label = self.mode = ""
        self.reply: dict[str, Any] = {}
        """Of the last commit."""

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        """Have the engine join."""
        self._ask("init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        """Open an update."""
        self._ask("start_weight_update", weight_version=self.label)

    def update_weights(self, request: dict[str, Any], **options: Any) -> None:
        """Have tensors received; `start` opens the update, and `finish` commits it."""
        if "start" in options:
            options["start"] = options["start"] | {"weight_version": self.label}
        if "finish" in options:
            options["finish"] = options["finish"] | {"mode": self.mode}
        reply = self._ask("update_weights", request, **options)
        if "finish" in options:
            self.reply = reply

    def finish_weight_update(self) -> None:
        """Commit."""
        self.reply = self._ask("finish_weight_update", mode=self.mode)

    def weight_update_status(self) -> Any:
        """Where its update stands."""
        return self._ask("weight_update_status")

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        call = getattr(self._engine, method)(*arguments, **options)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(PATIENCE_S)


class Far:
    """The process, and what it is told, from the engine's event loop."""

    def __init__(self, engine: Any, backend: str, num_ranks: int, first: Path) -> None:
        self.backend = backend
        self._engine, self._num_ranks, self._first = engine, num_ranks, first
        self._calls = Calls(engine)
        self._running: FarTrainer | None = None
        self.num_joined = 0

    @property
    def is_up(self) -> bool:
        """Whether the process has joined and lives."""
        return self._running is not None

    async def join(self) -> None:
        """Start the process and have the engine join it, unless it is up."""
        if self._running is None:
            self._running = await asyncio.to_thread(self._joined)
            self.num_joined += 1

    async def send(self, folder: Path, label: str, mode: str) -> dict[str, Any]:
        """One update; the reply of its commit."""
        self._calls.label, self._calls.mode = label, mode
        assert self._running is not None
        await asyncio.to_thread(self._running.send, folder)
        return self._calls.reply

    async def die_half_way(self, folder: Path) -> str:
        """Be killed in the middle of an update; the phase in which that ends."""
        await self.join()
        assert self._running is not None
        self._calls.label = "never"
        try:
            await asyncio.to_thread(self._die, self._running, folder)
        finally:
            self._running = None
        if self.backend == LENDS:  # nobody waits for what it would have lent next
            await self._engine.abort_weight_update()
        (last, *_) = (await self._engine.weight_update_status())["outcomes"]
        return str(last["phase"])

    async def close(self) -> None:
        """End the process."""
        if self._running is not None:
            await asyncio.to_thread(self._running.kill)
            self._running = None

    def _joined(self) -> FarTrainer:
        options: dict[str, Any] = {"num_workers": self._num_ranks, **OPTIONS}
        if self.backend == LENDS:
            options["chunk_bytes"] = 1 << 17
        return FarTrainer(self._calls, self.backend, self._first, **options).__enter__()

    def _die(self, running: FarTrainer, folder: Path) -> None:
        sending = running.fall_silent(folder)
        running.kill()
        ends = EOFError if self.backend == LENDS else InflightError
        try:
            sending.result(PATIENCE_S)
        except ends:
            return
        raise AssertionError("an update of a trainer that was killed was committed")
