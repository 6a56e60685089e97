"""Whether vLLM's CPU build packs matrices on this host."""

import torch
from vllm import _custom_ops


def packs(dtype: torch.dtype) -> bool:
    """Whether it packs those of this dtype; with AVX2 alone, not in bf16."""
    if not _custom_ops._supports_onednn:
        return False
    try:
        _custom_ops.create_onednn_mm(torch.zeros(64, 64, dtype=dtype).t(), 32)
    except RuntimeError:
        return False
    return True
