"""The digest on a real GPU: equal to the CPU's, at the speed of memory."""

import pytest
import torch

from vllm.inflight import ops
from vllm.inflight.ops.gpu_digest import GpuDigest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int32,
]


def test_digests_and_counts_are_those_of_the_cpu():
    audit = GpuDigest(torch.device("cuda"), {})
    tensors = []
    for dtype in DTYPES:
        for shape in ((), (1,), (3,), (8,), (33, 7), (1000, 1001)):
            values = torch.randn(shape) * 50
            if dtype.is_floating_point:
                values.view(-1)[::7] = torch.nan
            tensors.append(values.to(dtype))
    tensors.append(torch.randn(40, 30).to(torch.bfloat16).t()[3:, 1::2])
    tensors.append(torch.randn(101).to(torch.bfloat16)[1:])
    audit.add([(str(number), tensor.cuda()) for number, tensor in enumerate(tensors)])
    seen = {name: (digest, bad) for name, digest, bad in audit.results()}
    wanted = zip(ops.digest(tensors), ops.count_nonfinite(tensors), strict=True)
    for number, expected in enumerate(wanted):
        assert seen[str(number)] == expected


PLAIN = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("served_as", PLAIN, ids=str)
def test_values_not_finite_in_the_served_dtype_are_counted(served_as):
    tensors = {}
    for dtype in PLAIN:
        limit = ops.nonfinite_limit(dtype, served_as)
        about = torch.arange(max(0, limit - 9), limit + 9)
        values = about.to(ops.INTEGERS[dtype.itemsize]).view(dtype)
        both = torch.cat([values, -values, torch.randn(100_000).to(dtype)])
        tensors[str(dtype)] = both.cuda()
    audit = GpuDigest(torch.device("cuda"), {}, None, lambda name, dtype: served_as)
    audit.add(list(tensors.items()))
    for name, _, bad in audit.results():
        # As the GPU converts them, which is what is served.
        assert bad == int((~tensors[name].to(served_as).isfinite()).sum()) >= 18, name


def test_the_gpu_digest_prints_its_speed():
    tensor = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    audit = GpuDigest(torch.device("cuda"), {})
    audit.add([("warm", tensor)])
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(4):
        audit.add([("again", tensor)])
    end.record()
    end.synchronize()
    seconds = start.elapsed_time(end) / 4e3
    print(f"audit: {tensor.nbytes / seconds / 1e9:.0f} GB/s")
    assert len({digest for _, digest, _ in audit.results()}) == 1
