"""The import path of earlier releases; the code is in `vllm.inflight.transport`."""

from vllm.inflight.transport.weight_source import (
    Weights,
)

__all__ = [
    "Weights",
]
