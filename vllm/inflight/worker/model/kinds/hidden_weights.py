"""Hidden weights: tensors that a model uses, and that are not among its parameters.

vLLM keeps some layers in plain dictionaries (poolers by their task). A layer may keep a
tensor in a list, an object, a closure or a partial function. No update loads, checks or
flips these tensors, so they would stay at the version of the start. They are searched
from every attribute of every layer, to any depth.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vllm.inflight import upstream
from vllm.inflight.attached import ATTRIBUTE
from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.model.kinds.cpu_packing import UNPACKED
from vllm.inflight.worker.model.layers import buffer_names, layers

PACKED = "cpu_linear"
"""Attribute in which the CPU build keeps a packed weight: a callable."""

IMPLEMENTATION = "impl"
"""Attribute in which attention layers keep their implementation."""

OF_CONFIGURATION = ("alibi_slopes",)
"""Attributes with tensors that no checkpoint has."""

LOOKED_AT = (
    "_parameters",
    "_buffers",
    "_modules",
    PACKED,
    UNPACKED,
    ATTRIBUTE,
)
"""Attributes that are flipped, that are searched separately, or that are ours."""

OF_A_STEP = ("deepstack_input_embeds",)
"""Attributes that a step fills, reads and clears (Qwen3-VL).

Between two steps they hold nothing of a version.
"""

WITHOUT_WEIGHTS = ("vllm.config.", "vllm.distributed.", "torch.", "enum.", "logging.")
"""Packages whose objects hold settings, connections or compiled code.

Tensors and torch layers are recognised before this is asked.
"""

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, torch.Size),
    *(type, types.ModuleType, types.BuiltinFunctionType, torch.device, torch.dtype),
)


def is_packed(layer: torch.nn.Module) -> bool:
    """Whether a layer multiplies with a packed form of its weight.

    Upstream keeps the packed form in the callable. A layer that multiplies with the
    weight itself has a callable that holds nothing.
    """
    holds = getattr(vars(layer).get(PACKED), "__closure__", None)
    return bool(holds) or UNPACKED in vars(layer)


@dataclass(frozen=True, slots=True)
class Reached:
    """An object that a layer can reach.

    Attributes:
        value: the object.
        path: the path to it from the layer.
        is_near: whether the layer itself, its attention implementation, or a
            container in one of these holds it. A near tensor of any dtype counts as a
            weight. Objects that are farther away also have tables of indices.

    """

    value: Any
    path: str
    is_near: bool

    def to(self, step: str, value: object, *, is_near: bool = False) -> Reached:
        """The object one step further."""
        return Reached(value, f"{self.path}{step}", is_near)


class HiddenWeights:
    """The hidden weights of one model: name of a layer, the layer, and a path from it.

    Args:
        model: that has been loaded.

    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known = {id(layer) for layer in model.modules()}
        """Layers that are walked themselves, and tensors that are flipped."""
        for _, layer in layers(model):
            tensors = (*layer._parameters.values(), *layer._buffers.values())
            self._known.update(id(one) for one in (layer, *tensors))
        self._seen: dict[tuple[int, bool, bool], Any] = {}
        """All objects that were searched, and how. They are held, so that no id is
        reused.

        An object is searched less closely through a quantised layer, or from farther
        away. So it
        is searched again if another layer holds it.
        """

    def __iter__(self) -> Iterator[tuple[str, torch.nn.Module, str]]:
        for name, layer in layers(self._model):
            for path in self._of_layer(layer):
                yield name, layer, path

    def _of_layer(self, layer: torch.nn.Module) -> Iterator[str]:
        # The tensors that processing leaves in a quantised layer have rules of their
        # own.
        is_deep = not quantized.is_processed(layer)
        ahead = deque(_attributes(layer))
        while ahead:
            reached = ahead.popleft()
            value = reached.value
            if isinstance(value, PLAIN) or id(value) in self._known:
                continue
            if isinstance(value, torch.Tensor):
                if _is_weight(reached):
                    self._known.add(id(value))  # it may be reached by several paths
                    self._seen[id(value), is_deep, True] = value
                    yield reached.path
                continue
            how = id(value), is_deep, reached.is_near
            if how in self._seen:
                continue
            self._seen[how] = value
            if isinstance(value, torch.nn.Module):
                yield from self._of_stranger(reached)
            elif (items := _items(reached)) is not None:
                ahead.extend(items)
            elif is_deep:
                ahead.extend(_inside(reached))

    def _of_stranger(self, reached: Reached) -> Iterator[str]:
        """Weights of a layer that is not among the model's own, and of its children."""
        for name, layer in reached.value.named_modules():
            if id(layer) in self._known:
                continue
            self._known.add(id(layer))
            path = f"{reached.path}.{name}" if name else reached.path
            for key, param in layer._parameters.items():
                if param is not None and id(param) not in self._known:
                    yield f"{path}.{key}"
            self._known.update(id(buffer) for buffer in layer._buffers.values())
            for key in buffer_names(layer):
                yield f"{path}.{key}"
            for below in self._of_layer(layer):
                yield f"{path}.{below}"


def _is_weight(reached: Reached) -> bool:
    tensor = reached.value
    if tensor.numel() <= 1 or tensor.is_meta:
        return False  # scalars are scales, equal in every version
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return reached.is_near or is_parameter or is_number


def _attributes(layer: torch.nn.Module) -> Iterator[Reached]:
    """The attributes of a layer that are not flipped."""
    if isinstance(layer, upstream.StageMissingLayer):
        return  # it stands for a layer that is never run
    for name, value in vars(layer).items():
        if name in LOOKED_AT or name in OF_A_STEP:
            continue
        if name == "weight" and not getattr(layer, "has_weight", True):
            continue  # a norm without a weight multiplies by ones
        if name != IMPLEMENTATION:
            yield Reached(value, name, is_near=True)
            continue
        for key, inner in getattr(value, "__dict__", {}).items():
            if key not in OF_CONFIGURATION:
                yield Reached(inner, f"{name}.{key}", is_near=True)


def _items(reached: Reached) -> list[Reached] | None:
    """The items of a Python container; None for any other object."""
    value, is_near = reached.value, reached.is_near
    if isinstance(value, dict | types.MappingProxyType):
        return [
            reached.to(f"[{key!s:.40}]", item, is_near=is_near)
            for key, item in list(value.items())
        ]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [
            reached.to(f"[{index}]", item, is_near=is_near)
            for index, item in enumerate(list(value))
        ]
    return None


def _inside(reached: Reached) -> Iterator[Reached]:
    """The objects that a function or an object holds."""
    value = reached.value
    if isinstance(value, types.MethodType):
        yield reached.to(".__self__", value.__self__)
        yield reached.to(".__func__", value.__func__)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(
            value.__code__.co_freevars, value.__closure__ or (), strict=True
        ):
            try:
                yield reached.to(f".<{name}>", cell.cell_contents)
            except ValueError:
                continue  # the variable has no value yet
        yield reached.to(".__defaults__", (value.__defaults__, value.__kwdefaults__))
        yield reached.to(".__dict__", vars(value))
    elif isinstance(value, functools.partial):
        yield reached.to(".func", value.func)
        yield reached.to(".args", (value.args, value.keywords))
    elif isinstance(value, weakref.ref):
        yield reached.to("()", value())
    elif not _is_without_weights(type(value)):
        for name, inner in getattr(value, "__dict__", {}).items():
            if name not in OF_CONFIGURATION:
                yield reached.to(f".{name}", inner)
        for name in _slots(type(value)):
            yield reached.to(f".{name}", getattr(value, name, None))


def _is_without_weights(kind: type) -> bool:
    """Whether objects of a class hold settings or connections."""
    is_settings = kind.__name__.endswith("Config") and "transformers" in kind.__module__
    return is_settings or f"{kind.__module__}.".startswith(WITHOUT_WEIGHTS)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(vars(base).get(name), types.MemberDescriptorType):
                yield name
