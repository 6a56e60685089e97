"""The layers and buffers of a model as it was loaded, without the wrappers put around
them.

With LoRA, upstream replaces layers of a loaded model by wrappers. A wrapper holds the
layer as `base_layer`, and stacks of adapters beside it. The stacks belong to no
version: they stay where they are when the weights change. Code that walks a live model
walks it with `layers`, and finds the same layers under the same names as without
wrappers.

An update loads, checks and flips parameters. A buffer that a model's loader fills, and
that its layer reads at every step, is made a parameter in both models, so that it
changes with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import attrgetter, is_

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model_state import ModelState, recall

Layer = tuple[str, torch.nn.Module]
"""Name and module of a layer."""


def layers(model: torch.nn.Module) -> Iterator[Layer]:
    """`model.named_modules()`, with each wrapper replaced by the layer in it."""
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
    """Every parameter of `layers(model)` once: name, layer, key in the layer,
    parameter."""
    seen: set[int] = set()
    for name, layer in layers(model):
        for key, param in layer._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                yield f"{name}.{key}" if name else key, layer, key, param


def parameters_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of `parameters(model)` by name; do not change the result.

    The model is walked at the first call, and again when a layer or a parameter of it
    was replaced. A walk takes milliseconds of Python, which a delta cannot spare.
    """
    if (walked := recall(model, Walked)) is None or not walked.is_current():
        ModelState.of(model).set(walked := Walked(model))
    return walked.by_name


class Walked:
    """The parameters of a model by name, and all that was walked to find them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.by_name = {name: param for name, *_, param in parameters(model)}
        self._layers = list(model.modules())
        self._found = contents(self._layers)

    def is_current(self) -> bool:
        """Whether a walk would find the same."""
        return are_same(contents(self._layers), self._found)


def contents(layers: list[torch.nn.Module]) -> list[object]:
    """All layers and parameters that these layers have themselves, in order."""
    # Without a loop of Python: a model of 36 layers has 1,200 of these dicts.
    dicts = chain(map(_modules_of, layers), map(_parameters_of, layers))
    return list(chain.from_iterable(map(dict.values, dicts)))


def are_same(found: list[object], others: list[object]) -> bool:
    """Whether two lists have the same objects in the same order."""
    return len(found) == len(others) and all(map(is_, found, others))


_modules_of, _parameters_of = attrgetter("_modules"), attrgetter("_parameters")


FILLED = ("layer_scalar",)
"""Buffers of Gemma 4.

Other models may read such a buffer once, at start, and are rejected.
"""

OF_CONFIGURATION = ("position_ids",)
"""Buffers that old checkpoints contain, and whose content is always the same."""


def adopt_buffers(model: torch.nn.Module) -> None:
    """Make parameters of the buffers of `model` that a checkpoint fills.

    Called when the model is built, before it is loaded a second time.
    """
    for layer in model.modules():
        for key in layer._buffers.keys() & set(FILLED):
            tensor = layer._buffers.pop(key)
            assert tensor is not None
            layer.register_parameter(key, torch.nn.Parameter(tensor, False))
            info = upstream.get_layerwise_info(layer)
            info.restore_metadata = upstream.capture_layer_to_meta(layer)


def buffer_names(layer: torch.nn.Module) -> Iterator[str]:
    """Buffers of `layer` that a checkpoint may fill, and that no update would fill."""
    if isinstance(layer, upstream.FusedMMInputNorm):
        return  # mean and deviation of pixels come from the configuration
    for key in layer._buffers.keys() - layer._non_persistent_buffers_set:
        tensor = layer._buffers[key]
        # Checkpoints have no names like vLLM's own, `_k_scale` and others.
        if tensor is None or key.startswith("_") or key in OF_CONFIGURATION:
            continue
        if tensor.is_floating_point() or tensor.numel() > 1:
            yield key
