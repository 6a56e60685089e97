"""Direct writes: a model's loader copies into a parameter without the parameter's
loader.

The loader of gpt-oss does so with experts and sinks, whole parameters at a time. No
parameter's loader sees these copies, so the copies themselves are watched. On the CPU
build, a layer has no memory during a load until it is complete; such a layer gets its
memory before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.inflight import upstream

WRITERS = ("GptOssForCausalLM",)
"""Models whose loaders write directly."""

WRITTEN = ("sinks", "w13_weight", "w13_bias", "w2_weight", "w2_bias")
"""The parameters that they write."""


def writes(model: torch.nn.Module) -> bool:
    """Whether a model's loader writes directly into parameters."""
    return type(model).__name__ in WRITERS


def direct_writes_obstacle(model: torch.nn.Module, num_ranks: int) -> str | None:
    """Why such a model cannot be updated; None if it can."""
    if writes(model) and num_ranks > 1:
        return (
            f"the loader of {type(model).__name__} writes into the tensors it is "
            f"handed where there are several ranks ({num_ranks})"
        )
    return None


class DirectWrites(TorchDispatchMode):
    """Sees the copies of a loader into these parameters.

    Args:
        module: the tree that is loaded, with a load under way.
        seen: called before a whole parameter is written, with its name, the
            parameter, and
            the source of the copy.

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
                    self._places[_place(param)] = f"{path}.{key}", param, info

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            found = self._places.get(_place(args[0]))
            if found is not None and found[1].shape == args[0].shape:
                name, param, info = found
                self._seen(name, param, args[1])
                if info.can_load():
                    # The layer does not count this write, so it is processed at the end
                    # of the load.
                    info.load_numel = max(1, info.load_numel)
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor begins. On `meta`, all tensors have the address 0."""
    return tensor.data_ptr() or tensor.untyped_storage()._cdata
