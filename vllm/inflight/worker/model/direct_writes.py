"""Direct writes: a model's loader copies into a parameter, past the parameter's own.

The loader of gpt-oss does so with experts and sinks, whole parameters at a time. Nobody
stands behind it there, so the copies themselves are watched. On the CPU build a layer
that is loaded has no memory until it is complete; such a layer is given some before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.inflight import upstream

WRITERS = ("GptOssForCausalLM",)
"""Models whose loaders write so."""

WRITTEN = ("sinks", "w13_weight", "w13_bias", "w2_weight", "w2_bias")
"""The parameters that they write."""


def writes(model: torch.nn.Module) -> bool:
    """Whether the loader of a model writes past its parameters'."""
    return type(model).__name__ in WRITERS


def direct_writes_obstacle(model: torch.nn.Module, num_ranks: int) -> str | None:
    """Why such a model cannot be exchanged; None if it can."""
    if writes(model) and num_ranks > 1:
        return (
            f"the loader of {type(model).__name__} writes into the tensors it is "
            f"handed where there are several ranks ({num_ranks})"
        )
    return None


class DirectWrites(TorchDispatchMode):
    """Sees what a loader copies into these parameters.

    Args:
        module: the tree that is loaded, with a load under way.
        seen: called with the name of a parameter, it, and what is copied into it,
            before all of it is written.

    """

    def __init__(
        self,
        module: torch.nn.Module,
        seen: Callable[[str, torch.Tensor, torch.Tensor], None],
    ) -> None:
        super().__init__()
        self._seen = seen
        self._places: dict[int, tuple[str, torch.Tensor, Any]] = {}
        for path, layer in module.named_modules():
            if layer._parameters.keys().isdisjoint(WRITTEN):
                continue
            info = upstream.get_layerwise_info(layer)
            if info.can_load():
                upstream.materialize_layer(layer, info)
            for key in WRITTEN:
                param = layer._parameters.get(key)
                if param is not None:
                    self._places[param.data_ptr()] = f"{path}.{key}", param, info

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            found = self._places.get(args[0].data_ptr())
            if found is not None and found[1].shape == args[0].shape:
                name, param, info = found
                self._seen(name, param, args[1])
                if info.can_load():
                    # Not complete by its own count, so it is processed in the end.
                    info.load_numel = max(1, info.load_numel)
        return func(*args, **(kwargs or {}))
