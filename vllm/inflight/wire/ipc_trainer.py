"""The import path of earlier releases; the code is in `vllm.inflight.transport`."""

from vllm.inflight.transport.cuda_ipc.trainer_engine import (
    IpcTrainerInitInfo,
)

__all__ = [
    "IpcTrainerInitInfo",
]
