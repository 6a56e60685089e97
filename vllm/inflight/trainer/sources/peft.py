"""Adapters that PEFT has put into a module: merged they are sent, else refused.

PEFT is not imported: its layers are known by the submodules that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm.inflight.errors import Malformed

BASE = "base_layer"
"""What a layer of PEFT calls the one that it was made around."""

MERGE = (
    "call model.merge_adapter() before publish() and model.unmerge_adapter() after it, "
    "or publish what model.merge_and_unload() returns"
)


def without_adapters(
    model: torch.nn.Module, named: Mapping[str, Any], cleaned: Callable[[str], str]
) -> dict[str, Any]:
    """The tensors of the model itself, under the names that it has without adapters.

    Args:
        model: that may have adapters in it.
        named: its tensors by their names, or some of them.
        cleaned: takes what wrappers wrote out of a name.

    Raises:
        Malformed: adapters are not merged into their layers; `tensors` names them.

    """
    kept: dict[str, str] = {}
    apart: set[str] = set()
    """Layers whose adapter is not merged."""
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
        # The innermost layer first: its names are the ones that the next looks for.
        for prefix in sorted(kept, key=len, reverse=True):
            if name.startswith(prefix):
                if not name.startswith(kept[prefix]):
                    break  # of the adapter
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
    """Which submodule of a layer of PEFT the model has; None of any other layer."""
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
