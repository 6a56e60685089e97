"""FP8 in blocks on any CPU: vLLM's kernel of the CPU build needs AMX.

Its layers multiply in plain torch here. They keep the layout of the checkpoint, as
those of `CutlassFp8BlockScaledMMKernel` do, or have scales of another shape, as those
of DeepGEMM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm import cpu
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.utils import replace_parameter

from tests.support.models.quantised import BLOCK
from vllm.inflight.worker.model.kinds import quantized

KERNEL = cpu.CPUFp8BlockScaledMMKernel
SCALE = "weight_scale_inv"


def use_torch(*, packs: bool) -> None:
    """Let engines of this process multiply with FP8 in blocks from now on.

    Args:
        packs: whether processing gives the scales another shape.

    """

    def process(self: Any, layer: Any) -> None:
        Fp8BlockScaledMMLinearKernel.process_weights_after_loading(self, layer)
        if packs:
            columns = getattr(layer, SCALE).data.t()
            replace_parameter(layer, SCALE, torch.stack([columns, columns]))

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        scale = getattr(layer, SCALE)
        scale = scale[0].t() if packs else scale
        for dim, size in enumerate(layer.weight.shape):
            scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
        weight = (layer.weight.float() * scale).to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    KERNEL.is_supported = classmethod(lambda *_: (True, None))
    KERNEL.process_weights_after_loading = process
    KERNEL.apply_weights = apply
    quantized.PROVED["cpu"].add(("Fp8LinearMethod", KERNEL.__name__))
