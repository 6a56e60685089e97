"""Mixture-of-experts layers: which of them can be updated, and what that takes.

Their weights are two parameters, `w13_weight` and `w2_weight`, in the format of their
kernel. The CPU build packs them once: its layers keep a kernel that was made with the
first weights, and later weights are copied over the packed ones as they come. So a
layer has to forget its kernel before it is loaded again. Triton's kernels, the choice
on Hopper GPUs, read the weights as a loader writes them.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm.inflight import tensor_names as names
from vllm.inflight import upstream
from vllm.inflight.worker.model import direct_writes
from vllm.inflight.worker.model.kinds.drafter import sent_names

PACKED_ONCE = "CPU"
"""The kernels that upstream packs weights for at their first load only."""

UNPACKED = ("TRITON", "BATCHED_TRITON")
"""The kernels that upstream packs nothing for."""


def is_experts(method: object) -> bool:
    """Whether a method of a layer is that of unquantised experts."""
    return type(method) is upstream.UnquantizedFusedMoEMethod


def is_packed(layer: torch.nn.Module) -> bool:
    """Whether a layer's experts are stored in another form than a loader writes."""
    method: Any = getattr(layer, "quant_method", None)
    return is_experts(method) and method.unquantized_backend.name == PACKED_ONCE


def experts_obstacle(method: Any) -> str | None:
    """Why the experts of a layer cannot be updated; None if they can."""
    kernels = method.unquantized_backend
    if kernels.name in (PACKED_ONCE, *UNPACKED):
        return None
    return (
        f"holds experts that are packed for {kernels.value}, which cannot be exchanged "
        "yet (--moe-backend triton packs nothing)"
    )


def are_shared_out(model: torch.nn.Module) -> bool:
    """Whether each rank holds some of the experts (expert parallelism)."""
    return any(
        getattr(layer, "_expert_map", None) is not None for layer in model.modules()
    )


def forget_kernels(module: torch.nn.Module) -> None:
    """Let the experts of a tree that is loaded into be packed anew."""
    layer: Any
    for layer in module.modules():
        if is_packed(layer):
            layer.quant_method.moe_kernel = None


def expert_checkpoint_names(layer: Any, path: str, key: str) -> list[str] | None:
    """The checkpoint names of the tensors of the parameter `key` of a layer.

    Args:
        layer: any layer.
        path: its name in the model.
        key: `w13_weight` or `w2_weight`, or a parameter of another layer.

    Returns:
        one name for each expert and projection; None if the layer has no experts.

    """
    stem, _, kind = key.partition("_")
    parts = path.split(".")
    if not is_experts(getattr(layer, "quant_method", None)) or "experts" not in parts:
        return None
    before = parts[: parts.index("experts")]
    return [
        ".".join([*before, f"{name}{kind}"])
        for param, name, _, _ in layer.get_expert_mapping()
        if param.endswith(f"{stem}_")
    ]


def tensor_names(module: torch.nn.Module, param: str) -> list[str]:
    """The checkpoint names of the tensors that fill a parameter of any layer."""
    if direct_writes.writes(module):
        return [param]  # its loader uses other names
    path, _, key = param.rpartition(".")
    found = expert_checkpoint_names(module.get_submodule(path), path, key)
    if found is None:
        fused = getattr(module, "packed_modules_mapping", {}) or {}
        found = names.checkpoint_names(param, fused)
    return sent_names(module, found)
