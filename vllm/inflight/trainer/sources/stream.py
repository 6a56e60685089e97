"""Any source of weights as one stream of named tensors.

All tensors of a module or a state dict are alive at once, so a tensor with two names is
recognised by its memory. A stream may reuse memory for the next tensor, so only its
names are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from vllm.inflight.errors import ConfigError, Malformed
from vllm.inflight.trainer.sources.cast import Cast, dtype_of
from vllm.inflight.trainer.sources.checkpoint_layout import (
    CheckpointLayout,
    find_revert,
)
from vllm.inflight.trainer.sources.modules import (
    Fact,
    ModuleTensors,
    NamedTensors,
    cleaned,
    fact,
    module_tensors,
    untied,
    whole,
)
from vllm.inflight.trainer.sources.shards import OwnShard, own_shard

Pair = tuple[str, torch.Tensor]
Source = (
    torch.nn.Module
    | Mapping[str, torch.Tensor]
    | Iterable[Pair]
    | Callable[[], Iterable[Pair]]
)


def check_source(source: object) -> None:
    """Raise `ConfigError` unless `source` can be read repeatedly."""
    if isinstance(source, torch.nn.Module | Mapping) or callable(source):
        return
    if isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"source is a path, {str(source)!r}; to publish a checkpoint on the "
            "server's host, call update_weights_from_disk"
        )
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


def tensors(source: Source, cast: Cast = None) -> Iterator[Pair]:
    """Every tensor of `source` once, gathered, detached and cast: (name, tensor).

    Sharded tensors are gathered, one tensor or layer at a time. Gathering is
    collective: ranks that do not publish must iterate too. A tensor is valid until the
    next one is taken.

    Args:
        source: a module, a state dict, an iterable of pairs, or a callable that returns
            one of these. A module gives its parameters and persistent buffers. A model
            of transformers gives the tensors of its checkpoint.
        cast: the dtype to cast them to.

    Raises:
        ConfigError: a tensor cannot be cast to what `cast` gives for its name.
        Malformed: an entry is not a named tensor, or cannot be sent.

    """
    with gathering(_as_they_are(source)) as pairs:
        for name, tensor in pairs:
            yield name, tensor.to(dtype_of(name, tensor.dtype, cast))


def _as_they_are(source: Source) -> Iterator[Pair]:
    """Every tensor, in the dtype that the source has it in."""
    named = _read(source)
    if isinstance(named, torch.nn.Module):
        yield from _of_module(named)
        return
    for name, tensor in _checked(named):
        with whole({name: tensor}) as gathered:
            yield from gathered.items()


def facts(source: Source, cast: Cast = None) -> Iterator[tuple[str, Fact]]:
    """Name, dtype and shape of every tensor that `tensors` yields, in the same order.

    This gathers as little as possible, but it may be collective as well.

    Raises:
        ConfigError: as `tensors` raises it.
        Malformed: an entry is not a named tensor, or cannot be sent.

    """
    for name, known in _facts_as_they_are(source):
        yield name, known._replace(dtype=dtype_of(name, known.dtype, cast))


def _facts_as_they_are(source: Source) -> Iterator[tuple[str, Fact]]:
    """The same, with the dtypes that the source has."""
    named = _read(source)
    if isinstance(named, torch.nn.Module):
        module = module_tensors(named)
        convert, _ = _plan(module)
        if convert is not None:
            yield from convert.facts.items()
        else:
            for part in module.parts:
                yield from module.facts(part).items()
        return
    for name, tensor in _checked(named):
        yield name, fact(tensor)


def shards(source: Source, cast: Cast = None) -> list[OwnShard]:
    """What this rank has of the tensors that `tensors` yields; not collective.

    Raises:
        ConfigError: the source is not shared out in boxes, or its tensors are not sent
            as they are in memory.
        Malformed: an entry is not a named tensor, or cannot be sent.

    """
    named = _read(source)
    if isinstance(named, torch.nn.Module):
        module = module_tensors(named)
        layout, _ = _plan(module)
        names = {} if layout is None else layout.renames
        if not isinstance(module, NamedTensors) or names is None:
            raise ConfigError(
                f"the tensors of {type(named).__name__} are not sent as its ranks have "
                "them (FSDP1, or another layout in checkpoints); leave delta_shards out"
            )
        pairs: Iterable[Pair] = (
            (names.get(name, name), tensor) for name, tensor in module.named.items()
        )
    else:
        pairs = _checked(named)
    found = (own_shard(name, tensor) for name, tensor in pairs)
    return [
        replace(one, tensor=one.tensor.to(dtype_of(one.name, one.tensor.dtype, cast)))
        for one in found
        if one is not None
    ]


def _of_module(source: torch.nn.Module, *, converts: bool = True) -> Iterator[Pair]:
    """The tensors of a module, in the order in which every rank gathers them.

    Without `converts`, tensors are not converted, for ranks that only gather.
    """
    module = module_tensors(source)
    convert, groups = _plan(module)
    for parts in groups:
        with module.whole(parts) as gathered:
            ready = convert(gathered) if convert and converts else gathered
            del gathered  # two copies of a layer exist only while it is converted
            while ready:
                name = next(iter(ready))
                yield name, ready.pop(name)


def _plan(module: ModuleTensors) -> tuple[CheckpointLayout | None, list[list[Any]]]:
    """The conversion of a module's tensors, and the parts to gather at a time."""
    one_at_a_time = [[part] for part in module.parts]
    if find_revert(module.model) is None:
        return None, one_at_a_time
    found = [module.facts(part) for part in module.parts]
    known = {name: it for part in found for name, it in part.items()}
    convert = CheckpointLayout.of(module.model, known)
    if convert is None:
        return None, one_at_a_time
    part_of = {name: number for number, part in enumerate(found) for name in part}
    joined: list[set[int]] = []
    for group in convert.groups:
        parts = {part_of[name] for name in group}
        # Groups that share a part are gathered together.
        parts.update(*(other for other in joined if other & parts))
        joined = [other for other in joined if not other & parts] + [parts]
    return convert, [[module.parts[n] for n in sorted(each)] for each in joined]


@contextmanager
def gathering(source: Iterable[Pair]) -> Iterator[Iterator[Pair]]:
    """A context with an iterator over `source`, which is read to its end on an error.

    The other ranks gather to the end and would wait for rank 0. At the next update,
    they would hand over a later tensor in place of the first.
    """
    gathered = iter(source)
    try:
        yield gathered
    except Exception:
        for _ in gathered:
            pass
        raise


def take_part(source: Source) -> None:
    """On a rank that does not publish: take part in gathering `source`. Collective.

    Every other rank of a trainer must call this while one rank publishes the same
    source. Without `torch.distributed`, or with a single rank, it does nothing.

    Args:
        source: the source that the other rank publishes, as for `tensors`.

    Raises:
        Malformed: an entry is not a named tensor, or cannot be sent.

    """
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        named = _read(source)
        if isinstance(named, torch.nn.Module):
            gathered = _of_module(named, converts=False)
        else:
            gathered = tensors(named)
        for _ in gathered:
            pass


def _read(source: Source) -> torch.nn.Module | Iterable[tuple[str, Any]]:
    """The module of a source, or its named entries."""
    if isinstance(source, torch.nn.Module):
        return source
    if isinstance(source, Mapping):
        return untied(source, once=False)
    if callable(source):
        return _read(source())
    return source


def _checked(named: Iterable[tuple[str, Any]]) -> Iterator[Pair]:
    """The tensors among named entries, under names without wrappers."""
    for entry in named:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            kind = type(entry).__name__
            raise Malformed(f"source has a {kind}, and not pairs of name and tensor")
        name, tensor = entry
        if not isinstance(tensor, torch.Tensor):
            if name.endswith("_extra_state"):
                continue  # extra state of a module, not a weight
            kind = type(tensor).__name__
            raise Malformed(f"{name!r} has the type {kind}, and is not a tensor")
        if tuple(tensor.shape) == (0,) and not hasattr(tensor, "ds_id"):
            raise Malformed(
                f"{name!r} has no elements. In the state dict of a ZeRO-3 model all "
                "that is shared out is like that: publish the module itself",
                tensors=[name],
            )
        yield cleaned(name), tensor
