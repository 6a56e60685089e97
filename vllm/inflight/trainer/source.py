"""The import path of earlier releases; the code is in `trainer.sources`."""

from vllm.inflight.trainer.sources.stream import take_part

__all__ = ["take_part"]
