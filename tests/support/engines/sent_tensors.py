"""Tensors of a checkpoint as they are sent in a request's body."""

import base64
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def entry(named: dict[str, torch.Tensor], metadata: Any = None) -> str:
    return base64.b64encode(save(named, metadata)).decode()


def flattened(named: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """A bucket, and SGLang's list of what is in it."""
    parts, start = [], 0
    for name, tensor in named.items():
        end = start + tensor.nbytes
        parts.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype),
                "start_idx": start,
                "end_idx": end,
                "numel": tensor.nbytes,
            }
        )
        start = end
    return torch.cat([t.flatten().view(torch.uint8) for t in named.values()]), parts


def halves(named: dict[str, Any]) -> list[dict[str, Any]]:
    names = list(named)
    cut = len(names) // 2
    return [{n: named[n] for n in part} for part in (names[:cut], names[cut:])]
