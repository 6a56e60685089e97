"""Upstream's reload of a model, layer by layer, that does not come to its end.

While one is under way a layer's parameters have no memory: each gets it back when all
of its tensors have come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm.inflight import upstream


def release(model: torch.nn.Module, chosen: Callable[[Any], bool]) -> int:
    """Take the layers of a load that are `chosen` out of it, as they were before.

    Args:
        model: that is loaded.
        chosen: what upstream notes of a layer → whether it is meant.

    Returns:
        how many they were.

    """
    num_released = 0
    for layer in model.modules():
        info = upstream.get_layerwise_info(layer)
        if info.can_load() and chosen(info):
            if info.kernel_tensors is not None:
                upstream.place_kernel_tensors(layer, info)
            info.reset()
            num_released += 1
    return num_released


def leave(model: torch.nn.Module) -> int:
    """Leave a load, so that the next one starts clean; how many layers were in it."""
    num_released = release(model, lambda info: True)
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    return num_released
