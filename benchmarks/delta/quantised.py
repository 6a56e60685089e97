"""Checkpoints in FP8 and int8 that are made from weights in bf16."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

BLOCK = 128
"""Rows and columns that have one scale in FP8, as DeepSeek's checkpoints have."""
MOST_FP8 = 448.0
MOST_INT8 = 127.0


def fp8_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix in FP8, and the fp32 scale of each block."""
    rows, columns = weight.shape
    padding = (0, -columns % BLOCK, 0, -rows % BLOCK)
    tiled = functional.pad(weight.float(), padding)
    tiles = tiled.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-12) / MOST_FP8
    codes = (tiles / scales[:, None, :, None]).clamp(-MOST_FP8, MOST_FP8)
    whole = codes.flatten(2).flatten(0, 1)[:rows, :columns]
    return whole.contiguous().to(torch.float8_e4m3fn), scales


def int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a matrix in int8, and the bf16 scale of each row."""
    most = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12)
    scales = (most / MOST_INT8).bfloat16()
    codes = (weight.float() / scales.float()).round().clamp(-MOST_INT8, MOST_INT8)
    return codes.to(torch.int8), scales


def checkpoint(
    weights: Mapping[str, torch.Tensor], kind: str
) -> dict[str, torch.Tensor]:
    """The matrices of all layers, quantised; nothing else.

    Args:
        weights: of a model.
        kind: `fp8` or `int8`.

    """
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if "_proj" in name:
            codes, scales = (fp8_blocks if kind == "fp8" else int8_rows)(weight)
            found[name] = codes
            found[f"{name}_scale"] = scales
    return found
