"""Arithmetic of loaders, done on the device where a fresh engine does it.

Some loaders compute: Mamba's `A` is -exp of the checkpoint's tensor. A fresh engine
reads checkpoints on the host and has its parameters on the GPU, and the two round an
exponential differently. In an update, a tensor may arrive on the GPU, or a shadow
parameter may lie on the host. The computation still runs where a fresh engine runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Moves the functions of `ROUNDED` to another device, and nothing else.

    Args:
        origins: pairs of a tensor and the device on which functions of it are computed.

    """

    def __init__(self, *origins: tuple[object, torch.device]) -> None:
        super().__init__()
        # Weak references: the memory may be freed, and its address is not reused
        # meanwhile.
        self._places = {
            StorageWeakRef(tensor.untyped_storage()): place
            for tensor, place in origins
            if isinstance(tensor, torch.Tensor)
        }

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        place = self._place(args[0]) if args else None
        if place is not None and func in ROUNDED and not args[0].is_meta:
            args = args[0].to(place), *args[1:]
        result = func(*args, **(kwargs or {}))
        if place is not None and isinstance(result, torch.Tensor):
            self._places.setdefault(StorageWeakRef(result.untyped_storage()), place)
        return result

    def _place(self, tensor: object) -> torch.device | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        return self._places.get(StorageWeakRef(tensor.untyped_storage()))


def as_fresh(
    device: torch.device, param: torch.Tensor, loaded: object
) -> AbstractContextManager[Any]:
    """Context for a loader of `param` that runs with `loaded` on this device."""
    if device.type == "cpu":
        return nullcontext()
    return LoaderRounding((param, device), (loaded, HOST))
