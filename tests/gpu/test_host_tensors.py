"""Tensors of the host that an adopted method loads: through page-locked memory."""

import pytest
import torch

from vllm.inflight.worker.staging.adopted.host_tensors import PIECE_BYTES, HostTensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("num_bytes", [2, 4096, PIECE_BYTES, 3 * PIECE_BYTES + 6])
def test_a_tensor_arrives_bit_for_bit_while_the_next_one_is_written(
    num_bytes: int,
) -> None:
    device = torch.device("cuda", 0)
    copies, stream = HostTensors(device), torch.cuda.Stream(device)
    bits = torch.randint(-(2**15), 2**15, (num_bytes // 2,), dtype=torch.int16)
    with torch.device(device), torch.cuda.stream(stream):
        made = []
        for step in range(4):
            made.append(copies.to_device(bits.view(torch.bfloat16)))
            bits += step  # what was copied does not change any more
    torch.cuda.synchronize(device)
    bits -= 6
    for step, tensor in enumerate(made):
        assert tensor.device == device
        assert torch.equal(tensor.cpu().view(torch.int16), bits)
        bits += step
