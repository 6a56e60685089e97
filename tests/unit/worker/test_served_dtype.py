"""The dtype that an engine tells its trainers, if a cast to it loses nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vllm.inflight.worker.shadow.shadow_model import ShadowModel


def shadow(model: nn.Module, quantised: set[str] | None = None) -> ShadowModel:
    made = object.__new__(ShadowModel)
    made.live = made.module = model
    made.quantised = quantised or set()
    made.computed = {}
    made.dtypes = {
        name: str(param.dtype).removeprefix("torch.")
        for name, param in model.named_parameters()
    }
    return made


def model(**buffers: torch.Tensor) -> nn.Module:
    made = nn.Linear(4, 4, dtype=torch.bfloat16)
    for name, tensor in buffers.items():
        made.register_buffer(name, tensor)
    return made


def test_an_engine_with_one_dtype_tells_it() -> None:
    assert shadow(model()).served_dtype == "bfloat16"
    ids = torch.arange(3)
    assert shadow(model(ids=ids)).served_dtype == "bfloat16"


def test_scales_of_the_kv_cache_come_from_no_checkpoint() -> None:
    assert shadow(model(_k_scale=torch.ones(()))).served_dtype == "bfloat16"


def test_buffers_that_are_not_saved_come_from_no_checkpoint() -> None:
    made = model()
    made.register_buffer("cos_sin_cache", torch.ones(3), persistent=False)
    assert shadow(made).served_dtype == "bfloat16"


def test_nothing_is_told_where_a_tensor_is_served_in_another_dtype() -> None:
    assert shadow(model(scale=torch.ones(3))).served_dtype is None
    made = model()
    made.bias = nn.Parameter(torch.zeros(4))
    assert shadow(made).served_dtype is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_nothing_is_told_of_quantised_layers(dtype: torch.dtype) -> None:
    made = shadow(nn.Linear(4, 4).to(dtype), quantised={"weight"})
    assert made.served_dtype is None


def test_nothing_is_told_where_a_loader_computes() -> None:
    made = shadow(model())
    made.computed = {"A_log": frozenset({"weight"})}
    assert made.served_dtype is None
