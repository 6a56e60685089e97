"""Derived parameters: what loading makes of others, and no checkpoint has.

Latent attention (MLA) multiplies with two halves of its `kv_b_proj` on their own, made
when the model has been loaded. A second set has its own two, made again of every
version before it is voted on. They change places as parameters do, and nothing has to
come for them.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model import quantized
from vllm.inflight.worker.model.layers import layers

HALVES = ("W_UV", "W_UK_T")


def is_derived(layer: torch.nn.Module, key: str) -> bool:
    """Whether the parameter `key` of a layer is made of others."""
    return key in HALVES and isinstance(layer, upstream.MLAAttention)


def derived_obstacle(layer: Any) -> str | None:
    """Why what a layer derives cannot be exchanged; None if it can."""
    if not isinstance(layer, upstream.MLAAttention):
        return None
    if quantized.is_quantised(layer.kv_b_proj):
        return "is latent attention over quantised weights, which was not tried"
    return None


def make_places(live: torch.nn.Module, module: torch.nn.Module) -> None:
    """Give `module`, which was not loaded, what loading has derived in `live`."""
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
    """Make them again, of what `module` holds now, where they lie."""
    for layer in module.modules():
        if isinstance(layer, upstream.MLAAttention):
            layer.process_weights_after_loading(dtype)
