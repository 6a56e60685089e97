"""Gathering the tensors of a trainer's module, by their names.

A module may be wrapped (DDP, torch.compile, DeepSpeed, PEFT). Its tensors may be
sharded over ranks (FSDP1, FSDP2, ZeRO-3). None of these packages is imported here: a
process that has not imported them has no such module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from vllm.inflight.errors import Malformed
from vllm.inflight.trainer.sources.peft import without_adapters

HEAD = "lm_head.weight"
"""The name of a head. If it is tied to the embedding, it is not sent again."""

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""The parts that torch's wrappers add to names."""

FLAT = ("_flat_param", "_fsdp_flattened")
"""The name of FSDP1's parameters, and the attribute that marks their views."""


Whole = AbstractContextManager[dict[str, torch.Tensor]]


class Fact(NamedTuple):
    """Dtype and shape of a tensor, which are known before it is gathered."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ModuleTensors(Protocol):
    """The tensors of a module, in parts that are gathered one at a time.

    Attributes:
        model: the module without its wrappers.
        parts: the keys of the parts, in the same order on every rank. Their type is up
            to the implementation.

    """

    model: torch.nn.Module
    parts: list[Any]

    def facts(self, part: Any) -> dict[str, Fact]:
        """Dtypes and shapes of a part by name. Collective if this must gather."""
        ...

    def whole(self, parts: Iterable[Any]) -> Whole:
        """A context with the gathered tensors of parts, by name. Collective."""
        ...


def module_tensors(module: torch.nn.Module) -> ModuleTensors:
    """The tensors of `module`, without its wrappers.

    Raises:
        Malformed: an adapter of PEFT is not merged.

    """
    module = _unwrapped(module)
    if units := _flat_units(module):
        return _Flat(module, units)
    return NamedTensors(module)


@contextmanager
def whole(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """A context with the tensors gathered and detached.

    This is collective for `DTensor`s and for parameters of ZeRO-3.

    Raises:
        Malformed: a tensor is a shard, and there is no way to gather it.

    """
    parted = [t for t in tensors.values() if hasattr(t, "ds_id")]
    with ExitStack() as gathered:
        if parted:
            zero = imported("deepspeed", "zero")
            if zero is None:
                raise Malformed(
                    f"{next(iter(tensors))!r} is shared out as ZeRO-3 does it, and "
                    "without deepspeed there is no way to gather it",
                    tensors=list(tensors),
                )
            gathered.enter_context(zero.GatheredParameters(parted))
        yield {name: _full(name, tensor) for name, tensor in tensors.items()}


def fact(tensor: torch.Tensor) -> Fact:
    """The dtype and the gathered shape of a tensor, which is not gathered for it."""
    return Fact(tensor.dtype, tuple(getattr(tensor, "ds_shape", tensor.shape)))


def is_head(name: str) -> bool:
    """Whether this is the name of a head, which may be tied to the embedding."""
    return name == HEAD or name.endswith("." + HEAD)


def cleaned(name: str) -> str:
    """A name without the parts that torch's wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def untied(
    named: Mapping[str, Any], *, once: bool, tied: Iterable[str] = ()
) -> Iterator[tuple[str, Any]]:
    """The tensors without a tied head; with `once`, each tensor under one name.

    Two entries of a state dict may share memory by chance, and both may be needed. Two
    entries of a module are tied by design, and a checkpoint has them once.

    Args:
        named: the tensors by name.
        once: whether a tensor may have only one name.
        tied: names that are dropped before others, besides the name of a head.

    """
    last, seen = {*tied}, set()

    def gives_way(name: str) -> bool:
        return name in last or is_head(name)

    # Sorted last, so that of two names these are dropped.
    for name, tensor in sorted(named.items(), key=lambda item: gives_way(item[0])):
        where = _memory(tensor)
        if where in seen and (once or gives_way(name)):
            continue
        seen.add(where)
        yield name, tensor


class NamedTensors:
    """Tensors under names of their own: whole, `DTensor`s, or parameters of ZeRO-3."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.model = module
        # Not detached: a parameter with two names must be one object.
        self.named = _of_model(module, module.state_dict(keep_vars=True))
        # ZeRO-3 gathers many small tensors as fast as one.
        by_layer = any(hasattr(tensor, "ds_id") for tensor in self.named.values())
        names = list(self.named)
        self.parts = layers(names) if by_layer else [[name] for name in names]

    def facts(self, part: list[str]) -> dict[str, Fact]:
        return {name: fact(self.named[name]) for name in part}

    def whole(self, parts: Iterable[list[str]]) -> Whole:
        return whole({name: self.named[name] for part in parts for name in part})


class _Flat:
    """Tensors of FSDP1, which keeps all tensors of a unit in one flat parameter."""

    def __init__(self, module: torch.nn.Module, units: Mapping[str, Any]) -> None:
        self.model = module
        while isinstance(self.model, type(next(iter(units.values())))):
            self.model = self.model.module
        self._units = units
        # The root first: FSDP takes the one that is gathered first for it. And what no
        # unit has is a part of its own.
        self.parts = list(dict.fromkeys(["", *units]))
        self._outside: dict[str, torch.Tensor] = {}
        if "" not in units:
            self._outside = _own(module, "", {id(unit) for unit in units.values()})

    def facts(self, part: str) -> dict[str, Fact]:
        with self.whole([part]) as tensors:
            return {name: fact(tensor) for name, tensor in tensors.items()}

    @contextmanager
    def whole(self, parts: Iterable[str]) -> Iterator[dict[str, torch.Tensor]]:
        found: dict[str, torch.Tensor] = {}
        with ExitStack() as opened:
            for path in parts:
                found |= opened.enter_context(self._opened(path))
            yield {name: tensor.detach() for name, tensor in found.items()}

    @contextmanager
    def _opened(self, path: str) -> Iterator[dict[str, torch.Tensor]]:
        """A unit's gathered tensors, without those of nested units."""
        unit = self._units.get(path)
        if unit is None:
            yield _of_model(self.model, self._outside)
            return
        with type(unit).summon_full_params(unit, recurse=False, writeback=False):
            own = _own(unit, path, {id(each) for each in self._units.values()})
            yield _of_model(self.model, own)


def layers(names: Iterable[str]) -> list[list[str]]:
    """The names grouped by layer: names that are equal up to their first number."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0)
        found.setdefault(tuple(parts[:end]), []).append(name)
    return list(found.values())


def _of_model(model: torch.nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `named` that a checkpoint has, under the model's own names."""
    named = {
        cleaned(name): tensor
        for name, tensor in named.items()
        if not name.endswith("_extra_state")  # extra state of a module, not a weight
    }
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise Malformed(f"{name!r} has the type {kind}, and is not a tensor")
    named = without_adapters(model, named, cleaned)
    # Attributes of transformers: names that checkpoints omit, and tied names.
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tied = getattr(model, "all_tied_weights_keys", None)
    return {
        name: tensor
        for name, tensor in untied(
            named, once=True, tied=tied if isinstance(tied, Mapping) else ()
        )
        if name not in ignored
    }


def _own(
    module: torch.nn.Module, path: str, others: set[int]
) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a module, without modules in `others`."""
    found: dict[str, torch.Tensor] = {}
    prefix = f"{path}." if path else ""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            found[prefix + name] = tensor
    for name, child in module.named_children():
        if id(child) not in others:
            found |= _own(child, prefix + name, others)
    return found


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module without its wrappers, except FSDP1."""
    inner: Any = module
    while True:
        if isinstance(inner, torch.nn.parallel.DistributedDataParallel) or any(
            kind.__name__ == "DeepSpeedEngine" for kind in type(inner).__mro__
        ):
            inner = inner.module
        elif "_orig_mod" in inner._modules:
            inner = inner._orig_mod
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            if "prompt_encoder" in inner._modules:
                raise Malformed(
                    "a prompt that PEFT has learned is no weight of the model; publish "
                    "model.get_base_model() without it"
                )
            inner = inner.get_base_model()
        else:
            return inner


def _flat_units(module: torch.nn.Module) -> dict[str, Any]:
    """Path -> unit of FSDP1, the root first."""
    fsdp = imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    if fsdp is None:
        return {}
    return {path: m for path, m in module.named_modules() if isinstance(m, fsdp)}


def imported(module: str, name: str) -> Any:
    """The attribute `name` of a module; None if the process has not imported it."""
    return getattr(sys.modules.get(module), name, None)


def _full(name: str, tensor: torch.Tensor) -> torch.Tensor:
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)
    full = gather() if gather is not None else tensor
    if name.rpartition(".")[2] == FLAT[0] or getattr(full, FLAT[1], False):
        raise Malformed(
            f"{name!r} is a part of FSDP's flat parameter; publish the module itself, "
            "which is gathered unit by unit",
            tensors=[name],
        )
    return full.detach()


def _memory(tensor: object) -> object:
    """A key that is equal for two names of one tensor."""
    if (
        not isinstance(tensor, torch.Tensor)
        or hasattr(tensor, "full_tensor")  # an empty shard has no address
        or tensor.layout is not torch.strided
        or not tensor.data_ptr()
    ):
        return id(tensor)
    address = (str(tensor.device), tensor.data_ptr())
    return (*address, tensor.dtype, tuple(tensor.shape), tensor.stride())
