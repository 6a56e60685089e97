"""Adapters of PEFT in a module: merged adapters are sent, others are rejected.

PEFT is not imported. Its layers are recognised by their submodules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm.inflight.errors import Malformed

BASE = "base_layer"
"""The name that a layer of PEFT gives to the layer it wraps."""

MERGE = (
    "call model.merge_adapter() before publish() and model.unmerge_adapter() after it, "
    "or publish what model.merge_and_unload() returns"
)


def without_adapters(
    model: torch.nn.Module, named: Mapping[str, Any], cleaned: Callable[[str], str]
) -> dict[str, Any]:
    """The tensors of the model without adapters, under the names without adapters.

    Args:
        model: a module that may contain adapters.
        named: tensors of the model by name.
        cleaned: removes the parts of a name that wrappers add.

    Raises:
        Malformed: an adapter is not merged into its layer; `tensors` names the tensors.

    """
    kept: dict[str, str] = {}
    apart: set[str] = set()
    """The prefixes of layers whose adapter is not merged."""
    for path, module in model.named_modules():
        if (part := _kept(module)) is not None:
            prefix = cleaned(f"{path}." if path else "")
            kept[prefix] = f"{prefix}{part}."
            if part == BASE and not getattr(module, "merged", True):
                apart.add(prefix)
    if not kept:
        return dict(named)
    found, unmerged = {}, []
    for name, tensor in named.items():
        is_apart = False
        # The innermost layer comes first: outer layers look for the names without it.
        for prefix in sorted(kept, key=len, reverse=True):
            if name.startswith(prefix):
                if not name.startswith(kept[prefix]):
                    break  # a tensor of the adapter
                name = prefix + name.removeprefix(kept[prefix])
                is_apart = is_apart or prefix in apart
        else:
            found[name] = tensor
            unmerged += [name] if is_apart else []
    if unmerged:
        raise Malformed(
            f"an adapter of PEFT is not merged into {unmerged[0]!r} and "
            f"{len(unmerged) - 1} more tensors; {MERGE}",
            tensors=unmerged,
        )
    return found


def _kept(module: torch.nn.Module) -> str | None:
    """The submodule of a PEFT layer that belongs to the model; else None."""
    inside: dict[str, Any] = module._modules
    if BASE in inside:
        return BASE
    if "token_adapter" in inside:
        return "token_adapter"
    if "modules_to_save" in inside and "original_module" in inside:
        active = getattr(module, "active_adapter", None)
        if isinstance(active, list | tuple):
            active = active[0] if active else None
        is_off = getattr(module, "disable_adapters", False) is True
        if is_off or active not in inside["modules_to_save"]:
            return "original_module"
        return f"modules_to_save.{active}"
    return None
