"""`name_map="auto"`: names of a source are paired with the model's, and told."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from tests.support.trainers.fake_engine import NAMES, START, publisher, weights
from tests.support.waiting import until
from tests.unit.trainer import test_engine_clients as test_engines
from vllm.inflight.errors import (
    Cancelled,
    ConfigError,
    EngineFault,
    EngineUnreachable,
    WeightsMismatch,
)
from vllm.inflight.trainer import Publisher


def prefixed(value: float = 1.0, prefix: str = "module.") -> dict[str, torch.Tensor]:
    """The same as `weights`, as a wrapper calls them."""
    return {f"{prefix}{name}": tensor for name, tensor in weights(value).items()}


def test_names_are_paired_with_the_names_of_the_model_and_reported(engine, logged):
    with publisher(engine, prefixed(), name_map="auto") as to:
        outcome = to.publish("v")
    assert engine.served.keys() == weights().keys()
    assert outcome.mapped == {f"module.{name}": name for name in weights()}
    (line,) = logged
    for name in weights():
        assert f"'module.{name}' as {name!r}" in line


def test_names_that_the_model_has_are_not_changed(engine, logged):
    with publisher(engine, name_map="auto") as to:
        assert to.publish("v").mapped == {}
    assert engine.served.keys() == weights().keys() and logged == []


def test_an_engine_is_asked_once_for_what_every_version_has(engine, logged):
    with publisher(engine, prefixed(), name_map="auto") as to:
        first, second = to.publish(), to.publish()
    assert first.mapped == second.mapped != {}
    assert len(engine.bodies(NAMES)) == 1 and len(logged) == 1


def test_names_are_unchanged_and_no_engine_is_asked_if_name_map_is_not_set(engine):
    with publisher(engine, prefixed()) as to:
        assert to.publish().mapped == {}
    assert engine.bodies(NAMES) == [] and engine.served.keys() == prefixed().keys()


@pytest.mark.parametrize(
    ("names", "sent", "told"),
    [
        (  # two of the model's names could be meant
            {"a.proj.weight": torch.ones(2, 2), "b.proj.weight": torch.ones(2, 2)},
            {"c.proj.weight": torch.ones(2, 2)},
            "'c.proj.weight' could be 'a.proj.weight' or 'b.proj.weight'",
        ),
        (  # two that are sent could mean the same
            {"a.proj.weight": torch.ones(2, 2)},
            {"b.proj.weight": torch.ones(2, 2), "c.proj.weight": torch.ones(2, 2)},
            "'b.proj.weight' could be 'a.proj.weight'",
        ),
        (
            {"a.proj.weight": torch.ones(2, 2)},
            {"a.proj.weights": torch.ones(2, 2)},
            "'a.proj.weights' is like no name of the model",
        ),
        (  # the ending is the same, and the shape is not
            {"a.proj.weight": torch.ones(2, 2)},
            {"c.proj.weight": torch.ones(3, 2)},
            "'c.proj.weight' is like no name of the model",
        ),
        (  # nor is the kind of dtype
            {"a.proj.weight": torch.ones(2, 2)},
            {"c.proj.weight": torch.ones(2, 2, dtype=torch.int32)},
            "'c.proj.weight' is like no name of the model",
        ),
    ],
)
def test_an_ambiguous_or_unmatched_name_is_rejected_before_anything_is_sent(
    engine, names, sent, told
):
    engine.names = names
    with (
        publisher(engine, sent, name_map="auto") as to,
        pytest.raises(WeightsMismatch, match="nothing was sent") as refused,
    ):
        to.publish()
    assert told in str(refused.value) and refused.value.tensors == list(sent)
    assert engine.bodies(START) == []


def test_a_rejected_publish_matches_names_again(engine):
    source = prefixed() | {"extra": torch.ones(1)}
    with publisher(engine, lambda: source, name_map="auto") as to:
        with pytest.raises(WeightsMismatch, match="'extra'"):
            to.publish()
        del source["extra"]
        assert to.publish().mapped == {f"module.{name}": name for name in weights()}


def test_a_head_that_may_be_tied_is_left_to_the_engine(engine):
    source = prefixed() | {"lm_head.weight": torch.ones(4, 4)}
    with publisher(engine, source, name_map="auto") as to:
        assert "lm_head.weight" not in to.publish().mapped
    assert "lm_head.weight" in engine.served


def test_engines_whose_names_pair_differently_are_rejected(engine, other):
    other.names = {"b.weight": torch.ones(4, 4), "c.weight": torch.ones(3)}
    with (
        publisher([engine, other], prefixed(), name_map="auto") as to,
        pytest.raises(WeightsMismatch, match=other.url) as refused,
    ):
        to.publish()
    assert len(refused.value.tensors) == 1
    assert engine.bodies(START) == other.bodies(START) == []


def test_a_subset_is_of_names_that_a_whole_version_has_found(engine):
    with publisher(engine, prefixed(1.0), name_map="auto") as to:
        with pytest.raises(ConfigError, match="a whole version"):
            to.publish(subset=["a.*"])
        to.publish()
        outcome = to.publish(subset=["a.*"])
    assert engine.served.keys() == {"a.weight"}
    assert outcome.mapped == {"module.a.weight": "a.weight"}


def test_an_error_about_names_is_raised_with_the_address_of_the_engine(engine):
    engine.faults[NAMES] = [EngineFault("no names")]
    with (
        publisher(engine, name_map="auto") as to,
        pytest.raises(EngineFault, match=f"{engine.url}: no names"),
    ):
        to.publish()


def test_an_unknown_name_map_word_is_rejected(engine):
    with pytest.raises(ConfigError, match="'auto', got 'automatic'"):
        publisher(engine, name_map="automatic")


async def test_names_are_queried_in_the_background_on_the_engines_loop():
    class Named(test_engines.Async):
        async def weight_names(self) -> dict[str, Any]:
            await asyncio.sleep(0)
            return {"tensors": [{"name": "a", "shape": [4], "dtype": "float32"}]}

    with Publisher(Named(), {"module.a": torch.ones(4)}, name_map="auto") as to:
        future = to.publish(block=False)
        assert (await asyncio.wrap_future(future)).mapped == {"module.a": "a"}


def test_an_engine_that_does_not_return_its_names_is_reported_as_unreachable(engine):
    engine.held[NAMES] = held = threading.Event()
    with (
        publisher(engine, prefixed(), name_map="auto", timeout_s=1) as to,
        pytest.raises(EngineUnreachable, match="no answer"),
    ):
        to.publish()
    held.set()


def test_an_aborted_publish_does_not_wait_for_names(engine):
    engine.held[NAMES] = held = threading.Event()
    with (
        pytest.raises(ZeroDivisionError),
        publisher(engine, prefixed(), name_map="auto", timeout_s=60) as to,
    ):
        future = to.publish(block=False)
        until(lambda: engine.bodies(NAMES))
        raise ZeroDivisionError
    assert isinstance(future.exception(timeout=60), Cancelled)
    held.set()
