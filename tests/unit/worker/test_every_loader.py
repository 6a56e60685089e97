"""Every kind of loader, on every path and in any order: equal to a fresh load."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.support.models.every_loader import (
    GROUPS,
    IN_PLACE,
    LOADERS,
    MAPPED,
    SENT,
    Model,
    differing,
    fresh,
    version,
)
from tests.support.shadow_on_host import Batches, InPlace, Sets
from vllm.inflight.messages import FlipTo
from vllm.inflight.worker.memory.arena import Arena

TRANSPORTS = {
    "one by one": lambda named: named.items(),
    "in place, one by one": InPlace,
    "in place, in batches": Batches,
}


def test_there_is_a_form_for_every_tensor_and_a_loader_for_every_parameter():
    assert SENT.keys() == LOADERS.keys()
    filled = {key for loaders in LOADERS.values() for key in loaders}
    assert filled == {name for name, _ in Model(torch.zeros).named_parameters()}


def test_a_tensor_that_came_alone_before_the_wire_broke_is_loaded_in_its_turn():
    """Another tensor fills some of its elements; the one that comes last decides."""
    engine = Engine()
    engine.break_off(num_good=5, kind=InPlace, order=1)  # one of the two came
    engine.commit("in place, one by one", order=0)
    engine.teardown()


class Engine(RuleBasedStateMachine):
    """A model in an arena, its second set, and the updates of it."""

    traced = False

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.open(torch.device("cpu"), 1 << 26)
        first, traced = version(0), self.traced
        self.sets = Sets(self.arena, kind=Model, first=first, traced=traced)
        self.sets.shadow.asks_loader = True
        self.served = fresh(version(0))
        self.before: Model | None = None
        self.number = 0

    def teardown(self) -> None:
        self.arena.close()

    def _next(self, names: list[str], order: int) -> dict[str, torch.Tensor]:
        self.number += 1
        named = version(self.number)
        random.Random(order).shuffle(names)
        return {name: named[name] for name in names}

    def _flip(self, expected: Model, to: FlipTo = "next") -> None:
        self.sets.stager.flip(to)
        self.served, self.before = expected, self.served
        assert differing(self.sets.live, expected) == []

    @rule(transport=st.sampled_from(list(TRANSPORTS)), order=st.integers(0, 5))
    def commit(self, transport: str, order: int) -> None:
        named = self._next(list(SENT), order)
        self.before = None
        self.sets.stage(TRANSPORTS[transport](named))
        assert differing(self.sets.live, self.served) == []
        self._flip(fresh(named))

    @rule(
        groups=st.lists(st.sampled_from(GROUPS), min_size=1, max_size=4),
        transport=st.sampled_from(list(TRANSPORTS)),
        order=st.integers(0, 5),
    )
    def commit_a_subset(
        self, groups: list[tuple[str, ...]], transport: str, order: int
    ) -> None:
        names = sorted({name for group in groups for name in group})
        named = self._next(names, order)
        self.before = None
        self.sets.stage(TRANSPORTS[transport](named), names)
        self._flip(fresh(named, self.served))

    @rule(
        num_good=st.integers(0, len(SENT) - 1),
        kind=st.sampled_from([InPlace, Batches]),
        order=st.integers(0, 5),
    )
    def break_off(self, num_good: int, kind: type[InPlace], order: int) -> None:
        named = self._next(list(SENT), order)
        self.before = None
        with pytest.raises(ConnectionError):
            self.sets.stage(_Broken(named, num_good))
        assert differing(self.sets.live, self.served) == []

    @precondition(lambda self: self.before is not None)
    @rule()
    def roll_back(self) -> None:
        assert self.before is not None
        self._flip(self.before, "before")


class _Broken(InPlace):
    """One by one, as far as it comes; all of it was received in place by then."""


class TracedEngine(Engine):
    """One that knows its start checkpoint, so that its first update is replayed."""

    traced = True


TestEngine = Engine.TestCase
TestTracedEngine = TracedEngine.TestCase
TestEngine.settings = TestTracedEngine.settings = settings(
    max_examples=40, stateful_step_count=12, deadline=None, derandomize=True
)


@pytest.mark.parametrize(("kind", "num"), [(Engine, 3), (TracedEngine, 0)])
def test_exactly_the_eligible_tensors_are_replayed_and_received_in_place(kind, num):
    engine = kind()
    for order in range(num):
        engine.commit("in place, in batches", order)
    plan = engine.sets.shadow.plan
    assert {name for name, entry in plan.items() if entry.is_proved} == MAPPED
    homes = {name for name, entry in plan.items() if entry.home is not None}
    assert homes == IN_PLACE
    engine.commit("in place, in batches", num)
    assert engine.sets.intake.num_in_place == len(IN_PLACE)
    engine.teardown()
