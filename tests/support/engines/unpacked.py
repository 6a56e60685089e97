"""CPU engines whose matrices are not packed, as those of a GPU never are."""

from collections.abc import Iterator
from contextlib import contextmanager

import vllm._custom_ops as custom_ops
from vllm.model_executor.layers import utils


def unpack() -> None:
    """Have no layer packed from now on.

    It is upstream's own way for a CPU whose GEMM packs nothing.
    """
    custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


@contextmanager
def unpacked() -> Iterator[None]:
    """Context: layers of models that are loaded multiply with their own weights."""
    kept = custom_ops._supports_onednn, utils.check_cpu_sgl_kernel
    unpack()
    try:
        yield
    finally:
        custom_ops._supports_onednn, utils.check_cpu_sgl_kernel = kept
