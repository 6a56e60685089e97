"""Checkpoints in files, for whatever reads them."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.transports.peers import BUCKET_BYTES, tensors

Named = dict[str, torch.Tensor]


def everything() -> Named:
    """Of all dtypes, larger than some buckets, and many that share one."""
    odd = [torch.float8_e5m2, torch.float64, torch.int8, torch.int64, torch.uint16]
    named = {name: tensor.contiguous() for name, tensor in tensors().items()}
    named |= {str(dtype): torch.arange(21).view(3, 7).to(dtype) for dtype in odd}
    named |= {f"small.{n}": torch.full((n % 7,), n) for n in range(500)}
    return named


def buckets() -> Named:
    """As many as there are tensors, each of eight runs."""
    return {str(n): torch.full((BUCKET_BYTES // 4,), float(n)) for n in range(40)}


def written(folder: Path, named: Named, num_files: int = 3) -> list[Path]:
    """Files that have these tensors among them."""
    files = []
    for number in range(num_files):
        part = dict(list(named.items())[number::num_files])
        files.append(folder / f"{number}.safetensors")
        save_file(part, files[-1], {"format": "pt"})
    return files
