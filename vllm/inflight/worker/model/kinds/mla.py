"""Derived parameters: parameters that loading computes from others, in no checkpoint.

Latent attention (MLA) multiplies with the two halves of its `kv_b_proj` separately.
They are computed when the model has been loaded. The shadow model has two halves of its
own, computed again for every version before its prepare. They are flipped as parameters
are, and no tensor has to come for them.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.model.layers import layers

HALVES = ("W_UV", "W_UK_T")


def is_derived(layer: torch.nn.Module, key: str) -> bool:
    """Whether the parameter `key` of a layer is computed from others."""
    return key in HALVES and isinstance(layer, upstream.MLAAttention)


def is_latent(layer: torch.nn.Module) -> bool:
    """Whether a layer is latent attention."""
    return isinstance(layer, upstream.MLAAttention)


def are_views(layer: torch.nn.Module) -> bool:
    """Whether the derived parameters of a layer are views of its weight.

    Then they change with it, where it lies. So it is after upstream's first load, if
    the weight is not quantised.
    """
    projection: Any = layer.kv_b_proj
    weight: torch.Tensor | None = getattr(
        getattr(projection, "base_layer", projection), "weight", None
    )
    if weight is None or not weight.is_contiguous():
        return False
    first, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    halves = (layer._parameters.get(key) for key in HALVES)
    return all(
        half is not None
        and half.dtype == weight.dtype
        and first <= half.data_ptr() <= end - _reach(half)
        for half in halves
    )


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return (last + 1) * tensor.element_size()


def derived_obstacle(layer: object) -> str | None:
    """Why a layer with derived parameters cannot be updated; None if it can."""
    if not isinstance(layer, upstream.MLAAttention):
        return None
    if quantized.is_quantised(layer.kv_b_proj):
        return "is latent attention over quantised weights, which has not been tested"
    return None


def make_places(live: torch.nn.Module, module: torch.nn.Module) -> None:
    """Give `module`, which was not loaded, the derived parameters of `live`."""
    for (_, a), (_, b) in zip(layers(live), layers(module), strict=True):
        for key, param in a._parameters.items():
            if param is not None and is_derived(a, key):
                place = torch.empty_strided(
                    param.shape,
                    param.stride(),
                    dtype=param.dtype,
                    device=next(b.parameters()).device,
                )
                b.register_parameter(key, torch.nn.Parameter(place, False))


def derive(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Compute the derived parameters of `module` again, where they lie."""
    for layer in module.modules():
        if isinstance(layer, upstream.MLAAttention):
            layer.process_weights_after_loading(dtype)
