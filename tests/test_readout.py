"""What is read of a layer's weights, wherever the build keeps them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.inflight.stage.readout import rows
from vllm.inflight.stage.swappable import PACKED


class RowParallel(torch.nn.Module):
    """Half of a layer [3, 8] on each of two ranks; the weight may be packed away."""

    input_size, input_size_per_partition = 8, 4
    output_size = output_size_per_partition = 3

    def __init__(self, whole: torch.Tensor, *, is_packed: bool) -> None:
        super().__init__()
        held = torch.empty(0) if is_packed else whole
        self.weight = torch.nn.Parameter(held, False)
        self.bias = torch.nn.Parameter(torch.arange(3.0), False)
        if is_packed:
            vars(self)[PACKED] = lambda x, weight, bias: x @ whole.t()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_row_parallel_weight_is_a_part_along_its_inputs_and_its_bias_is_whole(
    is_packed: bool,
) -> None:
    whole = torch.arange(12.0).view(3, 4)
    model = torch.nn.Sequential(RowParallel(whole, is_packed=is_packed))
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1)
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=SimpleNamespace(parallel_config=parallel),
        rank=0,
    )
    weight, bias = (rows(worker, f"0.{key}", 3) for key in ("weight", "bias"))
    assert weight is not None and bias is not None
    assert (weight["dim"], weight["rows"]) == (1, whole.tolist())
    assert (bias["dim"], bias["rows"]) == (None, [0.0, 1.0, 2.0])
