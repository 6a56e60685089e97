"""Shadow parameters: parameters of the shadow model that are in kernel format.

A shadow parameter has the class, the loaders and the shard of the parameter that
upstream built, and memory of ours. Weights loaded into it can be served as they are.
So a reload has no layers to pack afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vllm.inflight import upstream
from vllm.inflight.errors import StagingUnavailable
from vllm.inflight.worker.model import layerwise_reload, registrations
from vllm.inflight.worker.model.kinds.quantized import (
    is_processed,
    is_quantised,
    quantised_layers,
)
from vllm.inflight.worker.model.layers import layers
from vllm.inflight.worker.model_state import ModelState, recall

Make = Callable[[torch.Tensor], torch.Tensor]
"""Live tensor → a tensor of the same form and content elsewhere."""


@dataclass(frozen=True, slots=True)
class Mirrored:
    """The parameters of a module tree are shadow parameters."""

    reloaded: list[torch.nn.Module]
    """The quantised layers; upstream's layerwise reload processes them."""


def is_mirrored(model: torch.nn.Module) -> bool:
    """Whether loading into `model` writes kernel format."""
    return recall(model, Mirrored) is not None


def reloaded(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of `model` that upstream's layerwise reload has to process.

    With shadow parameters, these are the quantised layers. They are found once, since
    decoding waits meanwhile.
    """
    mirrored = recall(model, Mirrored)
    return [model] if mirrored is None else mirrored.reloaded


def require_in_place(model: torch.nn.Module | None) -> None:
    """Raise if a reload has set aside layers that are loaded in place.

    A transport that keeps upstream's own function sets all layers aside, where ours
    would leave them. What is replayed into a layer, and what its loader is given, would
    not meet then.

    Raises:
        StagingUnavailable: some layers were set aside; they are back.

    """
    if model is None or not is_mirrored(model):
        return
    meant = {id(layer) for part in reloaded(model) for layer in part.modules()}
    aside = [
        name
        for name, layer in layers(model)
        if upstream.get_layerwise_info(layer).kernel_tensors is not None
        and id(layer) not in meant
    ]
    if not aside:
        return
    layerwise_reload.leave(model)
    raise StagingUnavailable(
        f"the transport has set aside {len(aside)} layers, among them {aside[0]!r}: it "
        "has kept vLLM's own initialize_layerwise_reload from before the plugins of "
        "vLLM were loaded",
        remedy="Have the transport look the function up in "
        "vllm.model_executor.model_loader.reload when it calls it, and send the update "
        "again.",
    )


def mirror_parameters(
    live: torch.nn.Module, module: torch.nn.Module, make: Make
) -> None:
    """Replace every parameter of `module` by a shadow parameter of `live`."""
    mirror_processed(live, module, make)
    made: dict[int, torch.nn.Parameter] = {}
    for (_, a), (_, b) in zip(layers(live), layers(module), strict=True):
        for key, param in a._parameters.items():
            built = b._parameters.get(key)
            if param is None or built is None or is_quantised(b):
                continue
            if id(param) not in made:  # tied layers share one object
                made[id(param)] = in_place_of(built, make(param.data))
            b._parameters[key] = made[id(param)]
    ModelState.of(module).set(Mirrored(quantised_layers(module)))


def in_place_of(built: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with the class, the loaders and the shard of `built`."""
    made = torch.nn.Parameter(data, requires_grad=False)
    made.__class__ = type(built)
    made.__dict__.update(vars(built))
    return made


def make_hollow(
    live: torch.nn.Module, module: torch.nn.Module, device: torch.device
) -> None:
    """Take the memory of the parameters of `module`, which get kernel format.

    Upstream's layerwise reload gives a quantised layer memory while it is loaded, all
    but its bias, which it loads in place.

    Args:
        live: the model that is served.
        module: a second tree of it.
        device: of the live model.

    """
    mirror_processed(live, module, make_empty)
    quantised = quantised_layers(module)
    for layer in quantised:
        bias = layer._parameters.get("bias")
        if bias is not None:
            data = torch.zeros(bias.shape, dtype=bias.dtype, device=device)
            layer._parameters["bias"] = in_place_of(bias, data)
    made: dict[int, torch.nn.Parameter] = {}
    for layer in module.modules():
        for key, param in layer._parameters.items():
            if param is None or param.is_meta or is_quantised(layer):
                continue
            if id(param) not in made:  # tied layers share one object
                made[id(param)] = in_place_of(param, make_empty(param.data))
            layer._parameters[key] = made[id(param)]
    ModelState.of(module).set(Mirrored(quantised))


@contextmanager
def lent_memory(
    module: torch.nn.Module, names: set[str], device: torch.device
) -> Iterator[dict[str, torch.nn.Parameter]]:
    """Context: these parameters of a tree have memory on this device, or none on
    `meta`.

    What is written there is lost at the end.
    """
    lent = lend(module, names, device)
    with standing_in(module, lent):
        yield lent


def lend(
    module: torch.nn.Module, names: Collection[str], device: torch.device
) -> dict[str, torch.nn.Parameter]:
    """Parameters like these of a tree, with memory on this device and no content."""
    return {
        name: in_place_of(param, make_empty(param, device))
        for name, param in module.named_parameters()
        if name in names
    }


@contextmanager
def standing_in(
    module: torch.nn.Module, lent: Mapping[str, torch.nn.Parameter]
) -> Iterator[None]:
    """Context: these parameters are in the places of those of a tree by their names."""
    named = {id(p): name for name, p in module.named_parameters() if name in lent}
    replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    try:
        for layer in module.modules():
            for key, param in layer._parameters.items():
                if param is None or (name := named.get(id(param))) is None:
                    continue
                replaced.append((layer, key, param))
                layer._parameters[key] = lent[name]  # tied layers share one object
        registrations.changed()
        yield
    finally:
        for layer, key, param in replaced:
            layer._parameters[key] = param
        registrations.changed()


def mirror_processed(
    live: torch.nn.Module, module: torch.nn.Module, make: Make
) -> None:
    """Give the quantised layers of `module` parameters like the processed ones of
    `live`.

    Upstream remembers the parameters in load format, and puts them in place during a
    load. Scales of a KV cache are no parameters any more once they are loaded.
    """
    for (_, a), (_, b) in zip(layers(live), layers(module), strict=True):
        if not is_processed(b):
            continue
        # A layer that is quantised while it is loaded starts with a load under way.
        upstream.get_layerwise_info(b).reset()
        built = dict(b._parameters)
        b._parameters.clear()
        for key, param in a._parameters.items():
            shadow_param = None
            if param is not None:
                shadow_param = torch.nn.Parameter(make(param.data), requires_grad=False)
                if key == "bias" and (bias := built.get(key)) is not None:
                    shadow_param.__class__ = type(
                        bias
                    )  # a bias stays in place during a load
                    shadow_param.__dict__.update(vars(bias))
            # Before 0.32, a scale of a KV cache is a buffer until it is processed.
            b._buffers.pop(key, None)
            b.register_parameter(key, shadow_param)


def make_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked host memory."""
    shadow_param = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True
    )
    return shadow_param.copy_(tensor)


def make_empty(
    tensor: torch.Tensor, device: torch.device | str = "meta"
) -> torch.Tensor:
    """A tensor of the same form without its content; on `meta`, without memory."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
    )


def make_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the same device, in memory of torch's own allocator."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
