"""Twins: the parameters of a second tree whose weights are in kernel format.

A twin has the class, the loaders and the shard of a parameter that upstream made, and
memory of ours. What is loaded into it can be served as it is, so a reload has no
layers to pack afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.inflight import upstream
from vllm.inflight.worker.model.layers import layers
from vllm.inflight.worker.model.quantized import (
    is_processed,
    is_quantised,
    quantised_layers,
)
from vllm.inflight.worker.model_state import ModelState, recall

Make = Callable[[torch.Tensor], torch.Tensor]
"""Live tensor → a tensor of the same form and content, elsewhere."""


@dataclass(frozen=True, slots=True)
class Mirrored:
    """The parameters of a module tree are shadow parameters."""

    reloaded: list[torch.nn.Module]
    """The quantised layers; upstream's layerwise reload processes them."""


def is_mirrored(model: torch.nn.Module) -> bool:
    """Whether loading into `model` writes kernel format."""
    return recall(model, Mirrored) is not None


def reloaded(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of `model` that are for upstream's layerwise reload to process.

    With twins, the quantised ones; looked for once, since decoding waits meanwhile.
    """
    mirrored = recall(model, Mirrored)
    return [model] if mirrored is None else mirrored.reloaded


def mirror_parameters(
    live: torch.nn.Module, module: torch.nn.Module, make: Make
) -> None:
    """Replace every parameter of `module` by a twin of the live tree's."""
    mirror_processed(live, module, make)
    twins: dict[int, torch.nn.Parameter] = {}
    for (_, a), (_, b) in zip(layers(live), layers(module), strict=True):
        for key, param in a._parameters.items():
            built = b._parameters.get(key)
            if param is None or built is None or is_quantised(b):
                continue
            if id(param) not in twins:  # tied layers share one object
                twin = torch.nn.Parameter(make(param.data), requires_grad=False)
                twin.__class__ = type(built)
                twin.__dict__.update(vars(built))
                twins[id(param)] = twin
            b._parameters[key] = twins[id(param)]
    ModelState.of(module).set(Mirrored(quantised_layers(module)))


def mirror_processed(
    live: torch.nn.Module, module: torch.nn.Module, make: Make
) -> None:
    """Give the quantised layers of `module` what loading has made of the live ones.

    Their own parameters, in load format, are remembered by upstream, which puts them
    in place for the time of a load. Scales of a KV cache are no parameters any more
    once they are loaded.
    """
    for (_, a), (_, b) in zip(layers(live), layers(module), strict=True):
        if not is_processed(b):
            continue
        # A layer that is quantised as it comes begins with a load under way.
        upstream.get_layerwise_info(b).reset()
        built = dict(b._parameters)
        b._parameters.clear()
        for key, param in a._parameters.items():
            twin = None
            if param is not None:
                twin = torch.nn.Parameter(make(param.data), requires_grad=False)
                if key == "bias" and (bias := built.get(key)) is not None:
                    twin.__class__ = type(bias)  # it stays in place for a load
                    twin.__dict__.update(vars(bias))
            b.register_parameter(key, twin)


def make_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In page-locked memory of the host."""
    twin = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=True
    )
    return twin.copy_(tensor)


def make_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the same device, from torch's own allocator."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)
