"""The import path of earlier releases; the code is in `vllm.inflight.transport`."""

from vllm.inflight.transport.collective.trainer_engine import (
    GlooTrainerInitInfo,
    NcclTrainerInitInfo,
    ShardMeta,
)

__all__ = [
    "GlooTrainerInitInfo",
    "NcclTrainerInitInfo",
    "ShardMeta",
]
