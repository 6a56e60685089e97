"""CPU engines whose matrices are not packed, as those of a GPU never are."""

from collections.abc import Iterator
from contextlib import contextmanager

import vllm._custom_ops as custom_ops
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as of_moe

from tests.support.engines import unpacked_experts


def unpack() -> None:
    """Have no layer packed from now on.

    It is upstream's own way for a CPU whose GEMM packs nothing. Experts get a kernel
    that packs nothing.
    """
    custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    of_moe.select_unquantized_moe_backend = unpacked_experts.select


@contextmanager
def unpacked() -> Iterator[None]:
    """Context: layers of models that are loaded multiply with their own weights."""
    kept = custom_ops._supports_onednn, utils.check_cpu_sgl_kernel
    unpack()
    try:
        yield
    finally:
        custom_ops._supports_onednn, utils.check_cpu_sgl_kernel = kept
        of_moe.select_unquantized_moe_backend = unpacked_experts.upstreams
