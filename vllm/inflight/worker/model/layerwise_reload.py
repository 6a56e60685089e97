"""Leaving upstream's layerwise reload of a model before its end.

During such a reload, a layer's parameters have no memory. Each layer gets its memory
back when all of its tensors have come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch

from vllm.inflight import upstream


def release(model: torch.nn.Module, chosen: Callable[[Any], bool]) -> None:
    """Take the layers that are `chosen` out of a load, as they were before it.

    Args:
        model: that is loaded.
        chosen: called with upstream's record of a layer; whether the layer is meant.

    """
    for layer in model.modules():
        info = upstream.get_layerwise_info(layer)
        # A layer that failed on its way into the load has its tensors set aside
        # already.
        is_in_load = info.can_load() or info.kernel_tensors is not None
        if is_in_load and chosen(info):
            if info.kernel_tensors is not None:
                upstream.place_kernel_tensors(layer, info)
            info.reset()


def forget_with(owner: object, models: Iterable[torch.nn.Module]) -> None:
    """Drop upstream's records of the layers of `models` when their `owner` is freed.

    From its first reload on, upstream's record of a layer refers to that layer. It
    would keep the layer and its weights in memory as long as the process.
    """
    noted = WeakSet(layer for model in models for layer in model.modules())
    weakref.finalize(owner, _forget, noted).atexit = False


def _forget(noted: WeakSet[torch.nn.Module]) -> None:
    for layer in noted:
        upstream.LAYERWISE_INFO.pop(layer, None)


def leave(model: torch.nn.Module) -> None:
    """Leave a load that did not end, if there is one; the next one starts clean."""
    release(model, lambda info: True)
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
