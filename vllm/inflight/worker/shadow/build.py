"""Building the shadow model from the same inputs as the live model.

Upstream's loader gets a configuration and a prefix; a drafter has its own. They are
remembered on each model when its loader returns, and used once more here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model import layer_registries
from vllm.inflight.worker.model.kinds.classifier import drop_left_out
from vllm.inflight.worker.model.kinds.drafter import ModelWithDrafter, share, trees
from vllm.inflight.worker.model.layers import adopt_buffers, layers
from vllm.inflight.worker.model_state import ModelState, recall


@dataclass(frozen=True, slots=True)
class BuildInputs:
    """The arguments of upstream's loader for one model."""

    vllm_config: upstream.VllmConfig
    model_config: upstream.ModelConfig
    prefix: str = ""

    def build(self, live: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """A second module tree like `live`, which shares no layer with it."""
        # Layers register themselves in the compilation config when they are built, and
        # reject a second layer of the same name. So the shadow model gets a copy of the
        # config with empty registries.
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
            _unshare(module, live)
        _tie(module, live)
        return module.eval()


def note(model: torch.nn.Module, inputs: BuildInputs) -> None:
    """Remember what `model` was built from, and adopt its buffers."""
    adopt_buffers(model)
    ModelState.of(model).set(inputs)


def build_inputs_of(
    model: torch.nn.Module, vllm_config: upstream.VllmConfig
) -> BuildInputs:
    """What `model` was built from; by default, what its engine is configured with."""
    default = BuildInputs(vllm_config, vllm_config.model_config)
    return recall(model, BuildInputs) or default


def _tie(module: torch.nn.Module, live: torch.nn.Module) -> None:
    """Tie the layers of `module` as those of `live` are tied.

    A checkpoint may have a head although the configuration ties it to the embedding.
    Upstream then builds the head untied, and ties it once both are loaded and equal.
    """
    built, shared = dict(layers(module)), dict[int, torch.nn.Parameter]()
    for name, layer in layers(live):
        for key, param in layer._parameters.items():
            second = built[name]._parameters.get(key) if name in built else None
            if param is not None and second is not None:
                built[name]._parameters[key] = shared.setdefault(id(param), second)


def _unshare(module: torch.nn.Module, live: torch.nn.Module) -> None:
    """Make `module` share no layer with `live`.

    Upstream caches rotary embeddings by their parameters, so both trees would share
    them. A reload of one tree would take the buffers of the other. They hold nothing of
    a version and the shadow model never runs, so an empty layer stands in for them.
    """
    shared = {id(layer) for layer in live.modules()}
    stand_ins: dict[int, torch.nn.Module] = {}

    def stand_in(layer: torch.nn.Module) -> torch.nn.Module:
        if next(layer.parameters(), None) is not None:
            raise RuntimeError(f"a {type(layer).__name__} is shared between two copies")
        if id(layer) not in stand_ins:
            stand_ins[id(layer)] = torch.nn.Module()
            for name, child in layer.named_children():
                stand_ins[id(layer)].add_module(name, stand_in(child))
        return stand_ins[id(layer)]

    for layer in list(module.modules()):
        if id(layer) in shared:
            continue  # its children belong to the live model
        for name, child in layer._modules.items():
            if child is not None and id(child) in shared:
                layer._modules[name] = stand_in(child)


def build_second(
    live: torch.nn.Module, vllm_config: upstream.VllmConfig, device: torch.device
) -> torch.nn.Module:
    """The second module tree of a model; of a model with drafter, one of each."""
    built = [
        build_inputs_of(tree, vllm_config).build(tree, device) for tree in trees(live)
    ]
    if not isinstance(live, ModelWithDrafter):
        return built[0]
    share(live, *built)
    return ModelWithDrafter(*built, is_mtp=live.is_mtp).eval()
