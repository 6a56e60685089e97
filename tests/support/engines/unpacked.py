"""CPU engines whose matrices are not packed, as those of a GPU never are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import vllm._custom_ops as custom_ops
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as of_moe
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular

CAN_UNPACK_EXPERTS = issubclass(CPUUnquantizedExperts, FusedMoEExpertsModular)
"""Whether a kernel can be put in the place of upstream's. In older releases it chooses
the experts, too, and experts stay packed."""


def unpack() -> None:
    """Have no layer packed from now on.

    It is upstream's own way for a CPU whose GEMM packs nothing. Experts get a kernel
    that packs nothing.
    """
    custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    # Else convolutions are packed in bf16.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    if CAN_UNPACK_EXPERTS:
        from tests.support.engines.unpacked_experts import select

        of_moe.select_unquantized_moe_backend = select


@contextmanager
def unpacked() -> Iterator[None]:
    """Context: layers of models that are loaded multiply with their own weights."""
    kept = custom_ops._supports_onednn, utils.check_cpu_sgl_kernel
    multiplies_bf16 = torch.cpu._is_avx512_bf16_supported
    select = of_moe.select_unquantized_moe_backend
    unpack()
    try:
        yield
    finally:
        custom_ops._supports_onednn, utils.check_cpu_sgl_kernel = kept
        torch.cpu._is_avx512_bf16_supported = multiplies_bf16
        of_moe.select_unquantized_moe_backend = select
