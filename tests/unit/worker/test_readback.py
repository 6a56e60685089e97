"""Reading back a layer's weights, wherever the build keeps them."""

from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader

from vllm.inflight.errors import EngineFault
from vllm.inflight.worker.model.kinds.hidden_weights import PACKED
from vllm.inflight.worker.verify.readback import content, rows


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
    parallel = SimpleNamespace(
        tensor_parallel_size=2, pipeline_parallel_size=1, world_size=2, rank=0
    )
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=SimpleNamespace(parallel_config=parallel),
        rank=0,
    )
    weight, bias = (rows(worker, f"0.{key}", 3) for key in ("weight", "bias"))
    assert weight is not None and bias is not None
    assert (weight["dim"], weight["rows"]) == (1, whole.tolist())
    assert (bias["dim"], bias["rows"]) == (None, [0.0, 1.0, 2.0])


def test_a_weight_that_is_packed_and_kept_is_read_with_the_sign_of_each_zero() -> None:
    """The product with a packed weight has another sign for some of them."""
    kept = torch.tensor([[-0.0, 1.0], [2.0, 0.0]])
    layer = torch.nn.Module()
    vars(layer)[PACKED] = lambda x, weight, bias: x @ (kept + 0.0).t()
    read = content(layer, "weight", kept)
    assert torch.equal(read.view(torch.int32), kept.view(torch.int32))


def test_a_packed_form_that_makes_zeros_of_numbers_next_to_zero_is_of_its_weight() -> (
    None
):
    """A GEMM may do that with numbers that are not normal, and loses no other bit."""
    kept = torch.tensor([[1e-40, 1.0], [2.0, -0.0]])
    layer = torch.nn.Module()
    seen = kept.where(kept.abs() > 1e-30, 0.0)
    vars(layer)[PACKED] = lambda x, weight, bias: x @ seen.t()
    read = content(layer, "weight", kept)
    assert torch.equal(read.view(torch.int32), kept.view(torch.int32))
    seen[1, 0] = 0.0
    with pytest.raises(EngineFault, match="two versions"):
        content(layer, "weight", kept)


class Mixer(torch.nn.Module):
    """A layer with a state: what is of its heads is cut by a loader of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.arange(4.0), False)
        vars(self.A_log)["weight_loader"] = sharded_weight_loader(0)
        self.norm = torch.nn.Parameter(torch.arange(4.0), False)


class Linear(torch.nn.Module):
    """A layer of several tensors in one, or what is on every rank."""

    input_size = 2

    def __init__(self, sizes: list[int], parts: list[int] | None = None) -> None:
        super().__init__()
        self.output_size = sum(sizes)
        self.output_partition_sizes = parts or sizes
        if parts:
            self.output_size_per_partition = sum(parts)
        rows = sum(self.output_partition_sizes)
        self.weight = torch.nn.Parameter(torch.zeros(rows, 2), False)
        vars(self.weight)["weight_loader"] = self.weight_loader

    def weight_loader(self, param: Any, tensor: Any) -> None: ...


class Model(torch.nn.Module):
    packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()
        self.gate = Linear([6])
        self.gate_up_proj = Linear([4, 4], [2, 2])
        self.in_proj = Linear([8], [4])
        self.in_proj.weight.weight_loader = sharded_weight_loader(0)
        self.out_proj = Linear([8], [4])
        loader = partial(self.out_proj.weight_loader, tensor=None)
        vars(self.out_proj.weight)["weight_loader"] = loader  # which has no name


def read(name: str, num_ranks: int) -> dict[str, Any]:
    model = Model()
    parallel = SimpleNamespace(
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=1,
        world_size=num_ranks,
        rank=0,
    )
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=SimpleNamespace(parallel_config=parallel),
        rank=0,
    )
    found = rows(worker, name, 100)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name",
    ["mixer.A_log", "gate_up_proj.weight", "in_proj.weight", "out_proj.weight"],
)
def test_a_weight_that_a_custom_loader_splits_is_rejected_by_name_on_several_ranks(
    name: str,
) -> None:
    assert name in read(name, 2)["refused"]
    assert "refused" not in read(name, 1)


@pytest.mark.parametrize(
    ("name", "dim"),
    [("mixer.norm", None), ("gate.weight", None), ("up_proj.weight", 0)],
)
def test_a_weight_that_is_whole_or_split_by_rows_is_read_on_several_ranks(
    name: str, dim: int | None
) -> None:
    assert read(name, 2)["dim"] == dim
