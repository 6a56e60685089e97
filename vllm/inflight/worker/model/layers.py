"""The layers of a model as it was loaded, whatever was put around them since.

With LoRA, upstream replaces layers of a loaded model by wrappers, which hold the layer
as `base_layer` and stacks of adapters beside it. The stacks are no part of a version:
they stay where they are when the weights change. Whoever walks a live model walks it
here, and finds the same layers under the same names as in a model without wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm.inflight import upstream

Layer = tuple[str, torch.nn.Module]
"""With its name."""


def layers(model: torch.nn.Module) -> Iterator[Layer]:
    """`model.named_modules()`, each wrapper replaced by the layer it is around."""
    seen: set[int] = set()  # tied layers may have a wrapper each

    def walk(name: str, layer: torch.nn.Module) -> Iterator[Layer]:
        while isinstance(layer, upstream.BaseLayerWithLoRA):
            layer = layer.base_layer
        if id(layer) in seen:
            return
        seen.add(id(layer))
        yield name, layer
        for key, child in layer._modules.items():
            if child is not None:
                yield from walk(f"{name}.{key}" if name else key, child)

    return walk("", model)


def parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Parameter]]:
    """Every parameter of `layers(model)` once: its name, its layer, its key there."""
    seen: set[int] = set()
    for name, layer in layers(model):
        for key, param in layer._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                yield f"{name}.{key}" if name else key, layer, key, param


FILLED = ("layer_scalar",)
"""Of Gemma 4. Others may be read once, when a model is built, and are refused."""

OF_CONFIGURATION = ("position_ids",)
"""Kept in old checkpoints, and always the same."""


def adopt_buffers(model: torch.nn.Module) -> None:
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


def buffer_names(layer: torch.nn.Module) -> Iterator[str]:
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
