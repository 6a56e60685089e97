"""Weights outside of a model's parameters are found, however they are kept."""

import functools
import types
import weakref
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.model_executor.models.utils import StageMissingLayer

from vllm.inflight.worker.model.kinds import quantized
from vllm.inflight.worker.model.kinds.hidden_weights import HiddenWeights


def paths(model: torch.nn.Module) -> list[str]:
    """Where hidden weights are found, from their layers."""
    return [path for _, _, path in HiddenWeights(model)]


def holding(value: Any) -> torch.nn.Module:
    """A model, a layer of which holds something."""
    layer = torch.nn.Linear(2, 2)
    vars(layer)["it"] = value  # where torch would register it, too
    return torch.nn.Sequential(torch.nn.Identity(), layer)


@dataclass
class Record:
    weight: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    weight: Any


class Keeper:
    """An object with a method."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def apply(self) -> Any:
        return self.weight


def in_closure(weight: Any) -> Any:
    return lambda: weight


def in_default(weight: Any) -> Any:
    def call(x: Any, of: Any = weight) -> Any:
        return x, of

    return call


def in_keyword(weight: Any) -> Any:
    def call(x: Any, *, of: Any = weight) -> Any:
        return x, of

    return call


def on_function(weight: Any) -> Any:
    def call() -> None:
        pass

    call.weight = weight  # type: ignore[attr-defined]
    return call


def deeper(value: Any, _: int) -> Any:
    return [Record(value)]


class Circle:
    """An object that holds itself."""

    def __init__(self, weight: Any) -> None:
        self.me, self.weight = [self], weight


KEPT = {
    "itself": lambda weight: weight,
    "dict": lambda weight: {"embed": weight},
    "list": lambda weight: [weight],
    "tuple": lambda weight: (0, weight),
    "set": lambda weight: {weight},
    "frozenset": lambda weight: frozenset([weight]),
    "deque": lambda weight: deque([weight]),
    "view of a dict": lambda weight: types.MappingProxyType({"embed": weight}),
    "list of dicts": lambda weight: [{"a": ({"b": [weight]},)}],
    "record": Record,
    "record with slots": Slotted,
    "namespace": lambda weight: SimpleNamespace(weight=weight),
    "object": Keeper,
    "bound method": lambda weight: Keeper(weight).apply,
    "closure": in_closure,
    "default": in_default,
    "default of a keyword": in_keyword,
    "attribute of a function": on_function,
    "partial": lambda weight: functools.partial(print, weight),
    "keyword of a partial": lambda weight: functools.partial(print, end=weight),
    "partial of a closure": lambda weight: functools.partial(in_closure(weight)),
    "circle": Circle,
    "deep": lambda weight: functools.reduce(
        lambda v, _: [Record(v)], range(99), weight
    ),
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_tensor_is_found_wherever_it_is_kept(keep: Any) -> None:
    (found,) = paths(holding(keep(torch.zeros(3))))
    assert found.startswith("it")


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_layer_is_found_wherever_it_is_kept(keep: Any) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU())
    (found,) = paths(holding(keep(inner)))
    assert found.startswith("it")
    assert found.endswith(".0.weight")


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_layer_or_parameter_of_the_model_may_be_kept_anywhere(
    keep: Any,
) -> None:
    model = holding(None)
    vars(model[1])["it"] = keep(model[1].weight)
    vars(model[0])["it"] = keep(model[1])
    assert paths(model) == []


def test_weights_behind_weak_references_are_found() -> None:
    weight = torch.nn.Linear(2, 2, bias=False)
    assert paths(holding(weakref.ref(weight))) == ["it().weight"]


def test_a_hidden_layer_is_searched_like_the_models_own_layers() -> None:
    hidden = torch.nn.Sequential(torch.nn.Identity(), torch.nn.BatchNorm1d(2))
    vars(hidden[0])["table"] = [torch.zeros(2)]
    assert set(paths(holding({"a": hidden}))) == {
        "it[a].0.table[0]",
        *(f"it[a].1.{key}" for key in ("weight", "bias")),
        *(f"it[a].1.{key}" for key in ("running_mean", "running_var")),
    }


def test_a_hidden_layer_without_weights_is_not_reported() -> None:
    rope = torch.nn.Module()
    rope.register_buffer("cache", torch.zeros(8), persistent=False)
    assert paths(holding([rope, torch.nn.ReLU()])) == []


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.5),
        [torch.ones(1)],
        SimpleNamespace(table=torch.arange(4)),
        torch.zeros(4, device="meta"),
        ParallelConfig(),
        StageMissingLayer("output", torch.nn.Linear(2, 2)),
        {
            "a": print,
            "b": torch.nn.Linear,
            "c": torch.bfloat16,
            "d": torch.ops.aten.add,
        },
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_no_version_changes_is_no_hidden_weight(value: Any) -> None:
    assert paths(holding(value)) == []


def test_a_value_shared_with_a_quantised_layer_is_searched_for_the_other_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    monkeypatch.setattr(quantized, "is_processed", lambda layer: layer is layers[0])
    shared = Record(torch.ones(2))
    for layer in layers:
        vars(layer)["it"] = shared
    assert paths(torch.nn.Sequential(*layers)) == ["it.weight"]


def test_a_container_is_searched_although_it_was_first_met_too_deep() -> None:
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    numbers = [torch.ones(4, dtype=torch.int8)]
    vars(layers[0])["far"], vars(layers[1])["near"] = Record(numbers), numbers
    assert paths(torch.nn.Sequential(*layers)) == ["near[0]"]
