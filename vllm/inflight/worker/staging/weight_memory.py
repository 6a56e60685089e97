"""The memory of the weights, which a method of a worker extension must not write.

An adopted method gives its tensors to `load_weights` of the shadow model, where each of
them is checked and digested. What it writes into a parameter itself would be served
under the digest of what it has loaded. A method that has kept parameters of the live
model would write into weights that decode. So operators of torch that write are looked
at before they run, wherever in the memory of a parameter they write.

Writes that are no operators of torch are not seen, such as those of NCCL that vLLM
calls past torch.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from vllm.inflight import ops
from vllm.inflight.worker.model.layers import parameters

Place = tuple[int, int, str]
"""Of a parameter: the addresses of its first byte and after its last, and its name."""


class WeightMemory:
    """Where the parameters of the shadow model and of the live model are.

    Args:
        shadow: the shadow model.
        live: the live model.

    """

    def __init__(self, shadow: torch.nn.Module, live: torch.nn.Module) -> None:
        self._models = {"the shadow model": shadow, "the live model": live}
        self._places: list[Place] | None = None

    def moved(self) -> None:
        """Parameters may have other places now."""
        self._places = None

    def written_by(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> str | None:
        """The parameter that an operator would write; None if it writes none."""
        for tensor in _written(func, args, kwargs):
            if (name := self._parameter_at(tensor)) is not None:
                return name
        return None

    def _parameter_at(self, tensor: torch.Tensor) -> str | None:
        if tensor.is_meta:
            return self._hollow_parameter(tensor)
        if not _is_in_memory(tensor):
            return None
        if self._places is None:
            self._places = _apart(sorted(self._found()))
        begin, end = _span(tensor)
        index = bisect.bisect_left(self._places, (end,)) - 1
        if index < 0 or self._places[index][1] <= begin:
            return None
        return self._places[index][2]

    def _hollow_parameter(self, tensor: torch.Tensor) -> str | None:
        """The parameter that a tensor without memory is a view of; None if of none.

        A layer has no memory until its load is complete. What is written into it is
        lost.
        """
        storage = tensor.untyped_storage()._cdata
        for name, param in self._named():
            if param.is_meta and param.untyped_storage()._cdata == storage:
                return name
        return None

    def _found(self) -> Iterator[Place]:
        for name, param in self._named():
            if _is_in_memory(param):
                yield *_span(param), name

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for where, model in self._models.items():
            for name, _, _, param in parameters(model):
                yield f"{name} of {where}", param


def _is_in_memory(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided
    return is_plain and bool(tensor.numel()) and ops.has_memory(tensor)


def _apart(places: list[Place]) -> list[Place]:
    """Sorted places, of which those that overlap are one, as of tied parameters."""
    found: list[Place] = []
    for begin, end, name in places:
        if found and begin < found[-1][1]:
            first, last, known = found.pop()
            begin, end, name = first, max(last, end), known
        found.append((begin, end, name))
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and after its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes."""
    for index, name in _outputs(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        yield from _tensors(value)


@functools.cache
def _outputs(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Place and name of each argument that an operator writes."""
    arguments = list(enumerate(func._schema.arguments))
    if func.namespace == "c10d":  # its schemas do not say it; outputs come first
        return (
            [(0, arguments[0][1].name)]
            if func.__name__.partition(".")[0].endswith("_")
            else []
        )
    return [
        (index, argument.name)
        for index, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
