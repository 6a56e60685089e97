"""The import path of earlier releases; the code is in `vllm.inflight.transport`."""

from vllm.inflight.transport.buckets.tensor_slices import (
    Shard,
)

__all__ = [
    "Shard",
]
