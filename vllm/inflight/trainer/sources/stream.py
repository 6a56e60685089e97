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
from vllm.inflight.trainer.sources.checkpoint_layout import CheckpointLayout, undoing
from vllm.inflight.trainer.sources.modules import (
    Fact,
    ModuleTensors,
    cleaned,
    fact,
    held,
    untied,
    whole,
)

Pair = tuple[str, torch.Tensor]
Source = (
    torch.nn.Module
    | Mapping[str, torch.Tensor]
    | Iterable[Pair]
    | Callable[[], Iterable[Pair]]
)


def check_source(source: Any) -> None:
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

    What is shared out over ranks is gathered, a tensor or a layer at a time. That is a
    collective operation: ranks that do not publish have to run through this as well.
    A tensor may be gone, or another, when the next one is asked for.

    Args:
        source: a module (its parameters and persistent buffers; of a model of
            transformers, what its checkpoint has), a state dict, an iterable of
            pairs, or a callable that returns one of these.

    Raises:
        Malformed: something in it is not a named tensor, or cannot be sent as it is.

    """
    named = _read(source)
    if isinstance(named, torch.nn.Module):
        yield from _of_module(named)
        return
    for name, tensor in _checked(named):
        with whole({name: tensor}) as gathered:
            yield from gathered.items()


def facts(source: Source) -> Iterator[tuple[str, Fact]]:
    """What `tensors` will yield, in that order: the name, dtype and shape of each.

    As little as possible is gathered for it, but it may be collective as well.

    Raises:
        Malformed: as `tensors` does.

    """
    named = _read(source)
    if isinstance(named, torch.nn.Module):
        module = held(named)
        convert, _ = _plan(module)
        if convert is not None:
            yield from convert.facts.items()
        else:
            for part in module.parts:
                yield from module.facts(part).items()
        return
    for name, tensor in _checked(named):
        yield name, fact(tensor)


def _of_module(source: torch.nn.Module, *, converts: bool = True) -> Iterator[Pair]:
    """Its tensors, in the order in which every rank gathers them.

    Without `converts` they are those of the module itself, for who only gathers.
    """
    module = held(source)
    convert, groups = _plan(module)
    for parts in groups:
        with module.whole(parts) as gathered:
            ready = convert(gathered) if convert and converts else gathered
            del gathered  # a layer is there twice only while it is converted
            while ready:
                name = next(iter(ready))
                yield name, ready.pop(name)


def _plan(module: ModuleTensors) -> tuple[CheckpointLayout | None, list[list[Any]]]:
    """How a module's tensors are converted, if they are, and which parts at a time."""
    one_at_a_time = [[part] for part in module.parts]
    if undoing(module.model) is None:
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
        # Parts of several groups are there for all of them.
        parts.update(*(other for other in joined if other & parts))
        joined = [other for other in joined if not other & parts] + [parts]
    return convert, [[module.parts[n] for n in sorted(each)] for each in joined]


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
        named = _read(source)
        if isinstance(named, torch.nn.Module):
            gathered = _of_module(named, converts=False)
        else:
            gathered = tensors(named)
        for _ in gathered:
            pass


def _read(source: Source) -> torch.nn.Module | Iterable[tuple[str, Any]]:
    """A module, or the named tensors of something else."""
    if isinstance(source, torch.nn.Module):
        return source
    if isinstance(source, Mapping):
        return untied(source, once=False)
    if callable(source):
        return _read(source())
    return source


def _checked(named: Iterable[tuple[str, Any]]) -> Iterator[Pair]:
    """The tensors among these, under names without wrappers."""
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            if name.endswith("_extra_state"):
                continue  # what modules keep beside their weights
            kind = type(tensor).__name__
            raise Malformed(f"{name!r} has the type {kind}, and is not a tensor")
        if tuple(tensor.shape) == (0,) and not hasattr(tensor, "ds_id"):
            raise Malformed(
                f"{name!r} has no elements. In the state dict of a ZeRO-3 model all "
                "that is shared out is like that: publish the module itself",
                tensors=[name],
            )
        yield cleaned(name), tensor
