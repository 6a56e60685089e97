"""Buffers that a checkpoint fills: made parameters, so that they change with them.

What is loaded, proved complete and exchanged is parameters. A buffer that a model's
loader fills like one, and its layer reads at every step, is made one in both trees.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm.inflight import upstream

FILLED = ("layer_scalar",)
"""Of Gemma 4. Others may be read once, when a model is built, and are refused."""

OF_CONFIGURATION = ("position_ids",)
"""Kept in old checkpoints, and always the same."""


def adopt(model: torch.nn.Module) -> None:
    """Make parameters of the buffers of `model` that a checkpoint fills.

    After its construction, before it is loaded a second time.
    """
    for layer in model.modules():
        for key in layer._buffers.keys() & set(FILLED):
            tensor = layer._buffers.pop(key)
            assert tensor is not None
            layer.register_parameter(key, torch.nn.Parameter(tensor, False))
            info = upstream.get_layerwise_info(layer)
            info.restore_metadata = upstream.capture_layer_to_meta(layer)


def filled(layer: torch.nn.Module) -> Iterator[str]:
    """Buffers of `layer` that a checkpoint may fill, and no update would."""
    if isinstance(layer, upstream.FusedMMInputNorm):
        return  # mean and deviation of pixels, from the processor's configuration
    for key in layer._buffers.keys() - layer._non_persistent_buffers_set:
        tensor = layer._buffers[key]
        # No checkpoint has names like vLLM's own, `_k_scale` and others.
        if tensor is None or key.startswith("_") or key in OF_CONFIGURATION:
            continue
        if tensor.is_floating_point() or tensor.numel() > 1:
            yield key
