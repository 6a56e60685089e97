"""The blueprint of a model: what upstream's loader built it from.

A model is built a second time from the same: a drafter has a configuration and a
prefix of its own. Written down when a loader returns the model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model import layer_registries
from vllm.inflight.worker.model.classifier import drop_left_out
from vllm.inflight.worker.model.drafter import ModelWithDrafter, share, trees
from vllm.inflight.worker.model.layers import adopt_buffers, layers
from vllm.inflight.worker.model_state import ModelState, recall


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """The arguments of the loader."""

    vllm_config: Any
    model_config: Any
    prefix: str = ""

    def build(self, live: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """A second tree of `live`, with which it shares no layer."""
        # The layers of a model enter themselves in the compilation config when they
        # are built, and refuse a second layer of the same name; the shadow gets a
        # copy with empty registers.
        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        config.compilation_config.mode = upstream.CompilationMode.NONE
        with (
            layer_registries.kept(),
            upstream.set_current_vllm_config(config),
            upstream.set_default_torch_dtype(self.model_config.dtype),
            device,
        ):
            module: torch.nn.Module = upstream.initialize_model(
                config, model_config=self.model_config, prefix=self.prefix
            )
            adopt_buffers(module)
            drop_left_out(module, live)
            _part(module, live)
        _tie(module, live)
        return module.eval()


def note(model: torch.nn.Module, inputs: BuildInputs) -> None:
    """Remember what `model` was built from, and adopt its buffers."""
    adopt_buffers(model)
    ModelState.of(model).set(inputs)


def build_inputs_of(model: torch.nn.Module, vllm_config: Any) -> BuildInputs:
    """What `model` was built from; by default, what its engine is configured with."""
    default = BuildInputs(vllm_config, vllm_config.model_config)
    return recall(model, BuildInputs) or default


def _tie(module: torch.nn.Module, live: torch.nn.Module) -> None:
    """Let the layers of `module` share what those of `live` share.

    A checkpoint may have a head though its model is configured with a tied one. Then
    upstream builds it untied, and ties it when both have come and are equal.
    """
    built, shared = dict(layers(module)), dict[int, torch.nn.Parameter]()
    for name, layer in layers(live):
        for key, param in layer._parameters.items():
            second = built[name]._parameters.get(key) if name in built else None
            if param is not None and second is not None:
                built[name]._parameters[key] = shared.setdefault(id(param), second)


def _part(module: torch.nn.Module, live: torch.nn.Module) -> None:
    """Let `module` share no layer with `live`.

    Upstream caches rotary embeddings by their parameters, and a reload of one
    tree would take the buffers of the other's. They hold nothing of a version,
    and this tree never runs, so an empty layer stands in for them.
    """
    shared = {id(layer) for layer in live.modules()}
    hollow: dict[int, torch.nn.Module] = {}

    def stand_in(layer: torch.nn.Module) -> torch.nn.Module:
        if next(layer.parameters(), None) is not None:
            raise RuntimeError(f"a {type(layer).__name__} is shared between two copies")
        if id(layer) not in hollow:
            hollow[id(layer)] = torch.nn.Module()
            for name, child in layer.named_children():
                hollow[id(layer)].add_module(name, stand_in(child))
        return hollow[id(layer)]

    for layer in list(module.modules()):
        if id(layer) in shared:
            continue  # what is inside it is the live tree's
        for name, child in layer._modules.items():
            if child is not None and id(child) in shared:
                layer._modules[name] = stand_in(child)


def build_second(
    live: torch.nn.Module, vllm_config: Any, device: torch.device
) -> torch.nn.Module:
    """A second tree of a model, or of a tandem: of each of the two."""
    built = [
        build_inputs_of(tree, vllm_config).build(tree, device) for tree in trees(live)
    ]
    if not isinstance(live, ModelWithDrafter):
        return built[0]
    share(live, *built)
    return ModelWithDrafter(*built, is_mtp=live.is_mtp).eval()
