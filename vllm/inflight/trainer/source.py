"""Where the weights come from: anything, as one stream of named tensors.

A module and a state dict have all their tensors alive at once, so one tensor
with two names is known by its memory. A stream may reuse memory from one tensor
to the next; there only the names are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from vllm.inflight.errors import ConfigError, Malformed

Pair = tuple[str, torch.Tensor]
Source = (
    torch.nn.Module
    | Mapping[str, torch.Tensor]
    | Iterable[Pair]
    | Callable[[], Iterable[Pair]]
)

HEAD = "lm_head.weight"
"""A head tied to the embedding; no engine wants it a second time."""

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch's wrappers write into names."""


def check(source: Any) -> None:
    """Raise `ConfigError` unless `source` can be read, and read again."""
    if isinstance(source, torch.nn.Module | Mapping) or callable(source):
        return
    if not isinstance(source, Iterable):
        raise ConfigError(
            "source must be a module, a state dict, a callable or an iterable of "
            f"(name, tensor), got {type(source).__name__}"
        )
    if iter(source) is source:
        raise ConfigError(
            "source is an iterator, which can be read only once; give the callable "
            "that makes it"
        )


def tensors(source: Source) -> Iterator[Pair]:
    """Every tensor of `source` once, whole and detached, as (name, tensor).

    Sharded tensors (`DTensor`) are gathered one at a time, which is a collective
    operation: ranks that do not publish have to run through this as well.

    Args:
        source: a module (its parameters and persistent buffers), a state dict, an
            iterable of pairs, or a callable that returns one of these.

    Raises:
        Malformed: something in it is not a named tensor.

    """
    for name, tensor in _named(source):
        if not isinstance(tensor, torch.Tensor):
            if name.endswith("_extra_state"):
                continue  # what modules keep beside their weights
            kind = type(tensor).__name__
            raise Malformed(f"{name!r} has the type {kind}, and is not a tensor")
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        gather = getattr(tensor, "full_tensor", None)
        yield name, (gather() if gather is not None else tensor).detach()


@contextmanager
def gathering(source: Iterable[Pair]) -> Iterator[Iterator[Pair]]:
    """What rank 0 sends of tensors, to whose end it gathers whatever fails.

    The other ranks do, and would wait for it; and at its next time they would hand over
    a later tensor in the place of the first.
    """
    gathered = iter(source)
    try:
        yield gathered
    except Exception:
        for _ in gathered:
            pass
        raise


def take_part(source: Source) -> None:
    """Gather `source` and let it go, if a trainer's other ranks do; else nothing."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        for _ in tensors(source):
            pass


def _named(source: Source) -> Iterable[tuple[str, Any]]:
    if isinstance(source, torch.nn.parallel.DistributedDataParallel):
        source = source.module
    if isinstance(source, torch.nn.Module):
        # Not detached, so that a parameter with two names is one object.
        return _untied(source.state_dict(keep_vars=True), once=True)
    if isinstance(source, Mapping):
        return _untied(source, once=False)
    if callable(source):
        return _named(source())
    return source


def _untied(named: Mapping[str, Any], *, once: bool) -> Iterator[tuple[str, Any]]:
    """Without a tied head; with `once`, without any second name of a tensor.

    Two entries of a state dict may share memory by chance and both be wanted;
    two of a module are tied by design, and checkpoints have them once.
    """
    seen = set()
    # The head last, so that of two names it is the one that goes.
    for name, tensor in sorted(named.items(), key=lambda item: _is_head(item[0])):
        where = _memory(tensor)
        if where in seen and (once or _is_head(name)):
            continue
        seen.add(where)
        yield name, tensor


def _is_head(name: str) -> bool:
    return name == HEAD or name.endswith("." + HEAD)


def _memory(tensor: Any) -> Any:
    """Equal for two names of one tensor."""
    if (
        not isinstance(tensor, torch.Tensor)
        or hasattr(tensor, "full_tensor")  # an empty shard has no address
        or tensor.layout is not torch.strided
        or not tensor.data_ptr()
    ):
        return id(tensor)
    address = (str(tensor.device), tensor.data_ptr())
    return (*address, tensor.dtype, tuple(tensor.shape), tensor.stride())
