"""How a trainer's module holds its tensors, and how to have them whole by their names.

A module may be wrapped (DDP, torch.compile, DeepSpeed, PEFT), and its tensors may be
shared out over ranks (FSDP of either version, ZeRO-3). None of these packages is
imported here: who has not imported them has no such module.
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
"""A head tied to the embedding; no engine wants it a second time."""

WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch's wrappers write into names."""

FLAT = ("_flat_param", "_fsdp_flattened")
"""What FSDP's first version calls its parameters, and what it marks the others by."""


Whole = AbstractContextManager[dict[str, torch.Tensor]]


class Fact(NamedTuple):
    """What is known of a tensor before it is gathered."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class ModuleTensors(Protocol):
    """The tensors of a module, in parts that are gathered one at a time.

    Attributes:
        model: the module without what it is wrapped in.
        parts: of it, each told by a key, in the same order on every rank.

    """

    model: torch.nn.Module
    parts: list[Any]

    def facts(self, part: Any) -> dict[str, Fact]:
        """Its tensors by their names. Collective, where it has to gather for it."""
        ...

    def whole(self, parts: Iterable[Any]) -> Whole:
        """A context in which some parts are whole, by their names. Collective."""
        ...


def held(module: torch.nn.Module) -> ModuleTensors:
    """The tensors of `module`.

    Raises:
        Malformed: adapters of PEFT are not merged.

    """
    module = _unwrapped(module)
    if units := _flat_units(module):
        return _Flat(module, units)
    return _Named(module)


@contextmanager
def whole(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """These tensors, gathered if they are shared out, and detached.

    Collective for `DTensor`s and for parameters of ZeRO-3.

    Raises:
        Malformed: one of them is a part, and nothing tells how to gather it.

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


def fact(tensor: Any) -> Fact:
    """Its dtype and its shape when it is whole; nothing is gathered."""
    return Fact(tensor.dtype, tuple(getattr(tensor, "ds_shape", tensor.shape)))


def is_head(name: str) -> bool:
    """Whether it is that of a head, which may be tied to the embedding."""
    return name == HEAD or name.endswith("." + HEAD)


def cleaned(name: str) -> str:
    """A name without what torch's wrappers wrote into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def untied(
    named: Mapping[str, Any], *, once: bool, tied: Iterable[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Without a tied head; with `once`, without any second name of a tensor.

    Two entries of a state dict may share memory by chance and both be wanted;
    two of a module are tied by design, and checkpoints have them once.

    Args:
        named: tensors by their names.
        once: whether no tensor may have two names.
        tied: names that give way to others, beside that of a head.

    """
    last, seen = {*tied}, set()

    def gives_way(name: str) -> bool:
        return name in last or is_head(name)

    # Those last, so that of two names they are the ones that go.
    for name, tensor in sorted(named.items(), key=lambda item: gives_way(item[0])):
        where = _memory(tensor)
        if where in seen and (once or gives_way(name)):
            continue
        seen.add(where)
        yield name, tensor


class _Named:
    """Tensors that stay where they are: whole, `DTensor`s, or parameters of ZeRO-3."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.model = module
        # Not detached, so that a parameter with two names is one object.
        self._tensors = _of_model(module, module.state_dict(keep_vars=True))
        # ZeRO-3 gathers many small ones together as fast as one of them.
        by_layer = any(hasattr(tensor, "ds_id") for tensor in self._tensors.values())
        names = list(self._tensors)
        self.parts = layers(names) if by_layer else [[name] for name in names]

    def facts(self, part: list[str]) -> dict[str, Fact]:
        return {name: fact(self._tensors[name]) for name in part}

    def whole(self, parts: Iterable[list[str]]) -> Whole:
        return whole({name: self._tensors[name] for part in parts for name in part})


class _Flat:
    """Tensors of FSDP's first version, which holds those of a unit in one."""

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
        """A unit's tensors, whole, without those of the units in it."""
        unit = self._units.get(path)
        if unit is None:
            yield _of_model(self.model, self._outside)
            return
        with type(unit).summon_full_params(unit, recurse=False, writeback=False):
            own = _own(unit, path, {id(each) for each in self._units.values()})
            yield _of_model(self.model, own)


def layers(names: Iterable[str]) -> list[list[str]]:
    """The names by layers: those that are equal up to their first number."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0)
        found.setdefault(tuple(parts[:end]), []).append(name)
    return list(found.values())


def _of_model(model: torch.nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of the model has of `named`, under the model's own names."""
    named = {
        cleaned(name): tensor
        for name, tensor in named.items()
        if not name.endswith("_extra_state")  # what modules keep beside their weights
    }
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise Malformed(f"{name!r} has the type {kind}, and is not a tensor")
    named = without_adapters(model, named, cleaned)
    # transformers' own words: what its checkpoints leave out, and what gives way.
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
    """Parameters and persistent buffers of a module, but not of the `others` in it."""
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
    """The module that others were made around, but for FSDP's first version."""
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
    """Units of FSDP's first version by their paths, the root's first."""
    fsdp = imported("torch.distributed.fsdp", "FullyShardedDataParallel")
    if fsdp is None:
        return {}
    return {path: m for path, m in module.named_modules() if isinstance(m, fsdp)}


def imported(module: str, name: str) -> Any:
    """`name` of a module that somebody has imported; else None."""
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
