"""What an engine serves, as one number of the bits of all its parameters.

Engines that serve the same bits may still decode different tokens: vLLM compiles each
engine's kernels for itself, and the best of several is chosen by the time that it
takes. Kernels of other shapes round otherwise.
"""

from __future__ import annotations

from typing import Any

import torch

PIECE = 1 << 24
"""Bytes that are summed up at once, in 8 times as much memory."""
PRIME = (1 << 31) - 1


def served_bits(worker: Any) -> int:
    """A number of 31 bits; another bit of a parameter, or another place, changes it.

    Other weights have the same number once in two billion times.

    Args:
        worker: of vLLM, with this package or without it: an argument of
            `collective_rpc`.

    """
    total = 0
    with torch.no_grad():
        for number, param in enumerate(worker.model_runner.model.parameters(), 1):
            data = param.detach().contiguous().view(-1).view(torch.uint8)
            for start in range(0, len(data), PIECE):
                piece = data[start : start + PIECE].to(torch.int64)
                places = torch.arange(len(piece), device=data.device) + start + number
                found = int((piece * (places * 40503 % PRIME)).sum())
                total = (total * 31 + found) % PRIME
    return total
