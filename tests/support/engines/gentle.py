"""Steps that leave the processor to others: each one sleeps before it samples.

A tiny model makes its tokens faster than a busy machine of two cores lets anybody else
come to his turn. What is to happen in the middle of a request then comes after its end,
however long that is.
"""

import time
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

SLEEP_S = 0.015
NAME = f"{__name__}:Gentle"


class Gentle(LogitsProcessor):
    """For `--logits-processors`; leaves all logits as they are."""

    def __init__(self, *_: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return False  # or greedy requests would go without it

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP_S)
        return logits
