"""The worker's end of `inflight_ipc`, on host memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.transports.host_memory import HostMemory
from tests.support.transports.peers import BUCKET_BYTES, CPU, Recorder
from vllm.inflight.transport.cuda_ipc.receiver_engine import IpcEngine


def worker(memory: HostMemory, model: Any = None, **options: Any) -> IpcEngine:
    config = SimpleNamespace(parallel_config=None, model_config=None)
    engine = IpcEngine(None, config, CPU, model or Recorder())
    options = {"bucket_bytes": BUCKET_BYTES} | options
    engine._open(engine.parse_init_info(options), memory)
    return engine


def receive(engine: IpcEngine, info: dict[str, Any]) -> None:
    engine.receive_weights(engine.parse_update_info(info))
