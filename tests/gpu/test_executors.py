"""Ray's executors on two GPUs: as vLLM starts them, whatever its ranks hand on."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
