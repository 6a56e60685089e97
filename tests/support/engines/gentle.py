"""Steps that leave the processor to others: each one sleeps before it samples.

A tiny model makes its tokens faster than a busy machine of two cores lets anybody else
come to his turn, and so does a GPU. What is to happen in the middle of a request then
comes after its end, however long that is.
"""

import time
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

try:
    # The second model runner of upstream, which GPUs have, takes no other class.
    from vllm.v1.worker.gpu.sample.logits_processor import (
        LogitsProcessor as OfSecondRunner,
    )
except ImportError:  # releases whose second runner has no such class
    OfSecondRunner = object

SLEEP_S = 0.015
NAME = f"{__name__}:Gentle"


class Gentle(LogitsProcessor, OfSecondRunner):  # type: ignore[misc]
    """For `--logits-processors` of either model runner; leaves all logits alone."""

    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False  # or greedy requests would go without it

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor, *_: Any) -> torch.Tensor:
        time.sleep(SLEEP_S)
        return logits
