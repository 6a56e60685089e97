"""Arithmetic of loaders: done where a fresh engine does it.

Some loaders compute: Mamba's `A` is -exp of what a checkpoint has. A fresh engine reads
checkpoints on the host and has its parameters on the GPU, and the two round an
exponential differently. Here a tensor may arrive on the GPU, or a parameter be staged
on the host; what is made of either is still made where a fresh engine would.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

HOST = torch.device("cpu")

_ATEN = torch.ops.aten

ROUNDED = frozenset(
    (
        *(_ATEN.exp.default, _ATEN.exp2.default, _ATEN.expm1.default),
        *(_ATEN.log.default, _ATEN.log2.default, _ATEN.log1p.default),
        *(_ATEN.sigmoid.default, _ATEN.softplus.default, _ATEN.tanh.default),
        *(_ATEN.pow.Tensor_Scalar, _ATEN.rsqrt.default, _ATEN.sum.dim_IntList),
    )
)
"""Functions whose results may differ in the last bit between a host and a GPU.

Adding, multiplying and casting single elements does not: IEEE 754 says what comes out.
"""


class LoaderRounding(TorchDispatchMode):
    """Moves the functions that are rounded, and nothing else.

    Args:
        origins: what tensors there are, and where is computed what is made of each.

    """

    def __init__(self, *origins: tuple[Any, torch.device]) -> None:
        super().__init__()
        # Held weakly: its memory may be freed, its address is nobody else's meanwhile.
        self._places = {
            StorageWeakRef(tensor.untyped_storage()): place
            for tensor, place in origins
            if isinstance(tensor, torch.Tensor)
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place = self._place(args[0]) if args else None
        if place is not None and func in ROUNDED:
            args = args[0].to(place), *args[1:]
        result = func(*args, **(kwargs or {}))
        if place is not None and isinstance(result, torch.Tensor):
            self._places.setdefault(StorageWeakRef(result.untyped_storage()), place)
        return result

    def _place(self, tensor: Any) -> torch.device | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        return self._places.get(StorageWeakRef(tensor.untyped_storage()))


def as_fresh(
    device: torch.device, param: torch.Tensor, loaded: Any
) -> AbstractContextManager[Any]:
    """While a loader of `param` runs with `loaded`, in an engine of this device."""
    if device.type == "cpu":
        return nullcontext()
    return LoaderRounding((param, device), (loaded, HOST))
