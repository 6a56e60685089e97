"""A packed int8 weight of the CPU build keeps the scales it was packed with."""

import inspect

import pytest
import torch

from vllm.inflight.patch.worker import _own_scales

SIZE = 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU build's kernel")
def test_changed_scales_do_not_change_a_packed_weight() -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    weight = torch.randint(-100, 100, (SIZE, SIZE), dtype=torch.int8).t()
    scales = torch.rand(SIZE, 1)
    x = torch.randn(3, SIZE, dtype=torch.bfloat16)

    def multiply(handler) -> torch.Tensor:
        rows, row_scales, zeros = ops.onednn_scaled_int8_quant(x)
        out = torch.empty(3, SIZE, dtype=x.dtype)
        ops.onednn_scaled_mm(handler, rows, out, row_scales, zeros, None, None)
        return out

    # An engine of this process has patched it, and twice it keeps the wrong copy.
    make = _own_scales(inspect.unwrap(ops.create_onednn_scaled_mm))
    handler = make(weight, scales, x.dtype, True, False)
    before = multiply(handler)
    scales.mul_(2)
    assert torch.equal(multiply(handler), before)
