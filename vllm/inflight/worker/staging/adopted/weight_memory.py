"""The memory of the weights, in which a method of a worker extension may not do as it
likes.

An adopted method gives its tensors to `load_weights` of the shadow model, or copies
them into the parameters of the shadow model itself; see parameter_writes.py. Any other
write would be served under the digest of something else. A method that has kept
parameters of the live model would write into weights that decode. So operators of
torch are looked at before they run, wherever in the memory of a parameter they write.

What the shadow model holds before it is written is older than what is served. A method
that computes from it, as one that adds a difference, would make weights that no trainer
has. So operators that read it are looked at, too.

What is no operator of torch is not seen, such as NCCL that vLLM calls past torch.
"""

from __future__ import annotations

import bisect
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from vllm.inflight import ops
from vllm.inflight.worker.model import registrations
from vllm.inflight.worker.model.layers import parameters
from vllm.inflight.worker.replay_plan import View

Whose = TypeVar("Whose")
"""What stands for a parameter."""

LIVE, SHADOW = "the live model", "the shadow model"

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}
FILLS = {
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
}
"""Operators that write all of a tensor, as loaders do with padding."""

FORMS = frozenset(
    f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")
) | frozenset(
    f"new_{kind}" for kind in ("empty", "empty_strided", "zeros", "ones", "full")
)
"""Operators that read the form of a tensor, and not its content."""


class Known(NamedTuple):
    """A parameter of one of the two models."""

    name: str
    model: str
    """`LIVE` or `SHADOW`."""
    param: torch.Tensor

    def __str__(self) -> str:
        return f"{self.name} of {self.model}"

    def view(self, tensor: torch.Tensor) -> View | None:
        """A tensor as a view of the parameter; None if it is none.

        The two have the same memory. So they may be views of different storages.
        """
        param = self.param
        if tensor.dtype != param.dtype:
            return None
        if tensor.is_meta:
            offset = int(tensor.storage_offset() - param.storage_offset())
        else:
            first, last = _span(param)
            begin, end = _span(tensor)
            if not first <= begin <= end <= last or (begin - first) % param.itemsize:
                return None
            offset = (begin - first) // param.itemsize
        return offset, tuple(tensor.shape), tuple(tensor.stride())


class Place(NamedTuple, Generic[Whose]):
    """The addresses of the first byte of a parameter, and after its last one."""

    begin: int
    end: int
    of: tuple[Whose, ...]
    """One parameter, or several that share memory."""


class PlaceTable(NamedTuple, Generic[Whose]):
    """Where parameters are."""

    in_memory: list[Place[Whose]]
    """Apart from each other, and sorted."""
    hollow: dict[int, Whose]
    """Parameters without memory, by their storage. A layer has no memory until its load
    is complete."""

    def of(self, tensor: torch.Tensor) -> list[Whose]:
        """The parameters that a tensor shares memory with."""
        if not tensor.numel():
            return []
        if tensor.is_meta:
            whose = self.hollow.get(tensor.untyped_storage()._cdata)
            return [] if whose is None else [whose]
        if not _is_in_memory(tensor):
            return []
        begin, end = _span(tensor)
        index = bisect.bisect_left(self.in_memory, end, key=_begin_of) - 1
        if index < 0 or self.in_memory[index].end <= begin:
            return []
        return list(self.in_memory[index].of)


class WeightMemory:
    """Where the parameters of the shadow model and of the live model are.

    Places where a parameter was earlier in the update stay known, since a method may
    have kept it.

    Args:
        shadow: the shadow model.
        live: the live model.
        kept: parameters that were theirs before.

    """

    def __init__(
        self,
        shadow: torch.nn.Module,
        live: torch.nn.Module,
        kept: Iterable[Known] = (),
    ) -> None:
        self._models = {SHADOW: shadow, LIVE: live}
        self._known = {id(known.param): known for known in kept}
        """By the id of the parameter, which is kept alive here."""
        self._num_moves = 0
        self._noted: tuple[int, PlaceTable[Known]] | None = None
        """Where they are, and how many moves that counts with."""

    @property
    def models(self) -> list[torch.nn.Module]:
        """The shadow model and the live model."""
        return [self._models[SHADOW], self._models[LIVE]]

    @property
    def known(self) -> list[Known]:
        """The parameters of both models, and those of before."""
        return list(self._known.values())

    def moved(self) -> None:
        """Parameters may have other places now."""
        self._num_moves += 1

    def note(self) -> PlaceTable[Known]:
        """Remember where the parameters are now, unless they have not moved.

        Another thread may say at any time that they have.
        """
        num_moves, noted = self._num_moves, self._noted
        if noted is not None and noted[0] == num_moves:
            return noted[1]
        for model, tree in self._models.items():
            for name, _, _, param in parameters(tree):
                self._known.setdefault(id(param), Known(name, model, param))
        known = list(self._known.values())  # another thread may add some
        found = [
            Place(*_span(each.param), (each,))
            for each in known
            if _is_in_memory(each.param)
        ]
        hollow = {
            each.param.untyped_storage()._cdata: each
            for each in known
            if each.param.is_meta
        }
        places = PlaceTable(_apart(sorted(found, key=lambda place: place[:2])), hollow)
        self._noted = num_moves, places
        return places

    def written_by(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> list[Known]:
        """The parameters that an operator would write."""
        return self._at(written(func, args, kwargs))

    def read_by(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> list[Known]:
        """The parameters whose content an operator would read."""
        return self._at(_named(_inputs(func), args, kwargs))

    def of(self, tensor: torch.Tensor) -> list[Known]:
        """The parameters that a tensor shares memory with."""
        return self.note().of(tensor)

    def _at(self, tensors: Iterable[torch.Tensor]) -> list[Known]:
        return [known for tensor in tensors for known in self.of(tensor)]


class LateMemory:
    """The memory of the weights, for threads of a method that has returned.

    These are the parameters of both models at the time of a write, and those that the
    threads may have kept. None of them is kept alive here. They are looked for only
    when a parameter may have moved, so the time that an operator takes does not depend
    on their number.

    Args:
        memory: of the call.

    """

    def __init__(self, memory: WeightMemory) -> None:
        self._models = [weakref.ref(model) for model in memory.models]
        self._kept = [
            (known.name, known.model, weakref.ref(known.param))
            for known in memory.known
        ]
        self._found: tuple[object, PlaceTable[str]] | None = None
        """Where they are, and the latest registration that it counts with."""

    def written_by(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> list[str]:
        """The parameters that an operator would write, with their models."""
        if not (tensors := list(written(func, args, kwargs))):
            return []
        places = self._now()
        return [name for tensor in tensors for name in places.of(tensor)]

    def _now(self) -> PlaceTable[str]:
        shadow, live = (model() for model in self._models)
        if shadow is None or live is None:  # the engine is gone
            return PlaceTable([], {})
        latest, found = registrations.latest(), self._found
        if found is None or found[0] is not latest:
            kept = (
                Known(name, model, param)
                for name, model, of in self._kept
                if (param := of()) is not None
            )
            in_memory, hollow = WeightMemory(shadow, live, kept).note()
            self._found = found = (
                latest,
                PlaceTable(
                    [Place(p.begin, p.end, (*map(str, p.of),)) for p in in_memory],
                    {storage: str(known) for storage, known in hollow.items()},
                ),
            )
        return found[1]


def written(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that an operator would write."""
    return _named(_outputs(func), args, kwargs)


def pairs_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The targets and the sources of an operator that only copies; empty for others."""
    if func in FILLS:
        value = args[1] if len(args) > 1 else 0
        if not isinstance(value, torch.Tensor):
            value = torch.full((), value, dtype=args[0].dtype, device="cpu")
        return [(args[0], value.expand(args[0].shape))]
    if func not in COPIES:
        return []
    targets, sources = args[0], args[1]
    if isinstance(targets, torch.Tensor):
        return [(targets, sources)]
    return list(zip(targets, sources, strict=True))


def _is_in_memory(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided
    return is_plain and bool(tensor.numel()) and ops.has_memory(tensor)


def _apart(places: list[Place[Known]]) -> list[Place[Known]]:
    """Sorted places, of which those that overlap are one, as of tied parameters."""
    found: list[Place[Known]] = []
    for place in places:
        if found and place.begin < found[-1].end:
            last = found.pop()
            place = Place(last.begin, max(last.end, place.end), last.of + place.of)
        found.append(place)
    return found


_begin_of = attrgetter("begin")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and after its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _named(
    arguments: Iterable[tuple[int, str]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Iterator[torch.Tensor]:
    """The tensors that a call gives for these arguments."""
    for index, name in arguments:
        yield from _tensors(args[index] if index < len(args) else kwargs.get(name))


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
    return _arguments(func, lambda alias: alias is not None and alias.is_write)


@functools.cache
def _inputs(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Place and name of each argument whose content an operator reads.

    A view of an argument reads nothing.
    """
    if func.__name__.partition(".")[0] in FORMS:
        return []
    written = _outputs(func)
    read = _arguments(func, lambda alias: alias is None)
    return [argument for argument in read if argument not in written]


def _arguments(
    func: torch._ops.OpOverload, is_meant: Callable[[Any], bool]
) -> list[tuple[int, str]]:
    return [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if is_meant(argument.alias_info)
    ]


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
