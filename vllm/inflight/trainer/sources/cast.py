"""The dtype that tensors are compared and sent in, where it is not the trainer's own.

A trainer may keep its weights in float32 for an engine that serves bfloat16. Nearly
every number of such weights changes at a step, and about one in a hundred of what is
served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from vllm.inflight.errors import ConfigError

Cast = torch.dtype | Callable[[str], torch.dtype | None] | None
"""The dtype of all tensors, or by their names; None: as they are."""


def check_cast(cast: object) -> None:
    """Raise `ConfigError` unless this is a `Cast`."""
    if isinstance(cast, torch.dtype):
        is_cast = _may_be_cast(cast)
    else:
        is_cast = cast is None or callable(cast)
    if not is_cast:
        raise ConfigError(
            "dtype must be a floating-point dtype of two bytes or more, or a function "
            f"from a name to one, got {cast!r}"
        )


def dtype_of(name: str, dtype: torch.dtype, cast: Cast) -> torch.dtype:
    """The dtype in which a tensor is sent.

    Floating-point numbers of two bytes or more are cast, and no others: quantised
    weights and whole numbers stay as they are.

    Args:
        name: of the tensor, in the source.
        dtype: in which the source has it.
        cast: what the user asks for.

    Raises:
        ConfigError: nothing can be cast to what `cast` gives for the name.

    """
    if cast is None or not _may_be_cast(dtype):
        return dtype
    if isinstance(cast, torch.dtype):
        return cast
    asked = cast(name)
    if asked is not None and not isinstance(asked, torch.dtype):
        raise ConfigError(
            f"dtype must give a dtype or None for {name!r}, got {asked!r}"
        )
    check_cast(asked)
    return asked or dtype


def served_dtype(engines: Iterable[Mapping[str, Any]]) -> torch.dtype | None:
    """The dtype in which all engines serve all floating-point tensors.

    Args:
        engines: the reply of each one to `GET /weight_info`.

    Returns:
        None if they serve several, or if a server of an older release does not tell.

    """
    told = {(engine.get("staging") or {}).get("dtype") for engine in engines}
    dtype = getattr(torch, str(told.pop()), None) if len(told) == 1 else None
    if isinstance(dtype, torch.dtype) and _may_be_cast(dtype):
        return dtype
    return None


def _may_be_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
