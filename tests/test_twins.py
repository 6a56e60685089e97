"""Twins in an arena: what a GPU does at an update, on the arena's twin of the host."""

from collections.abc import Iterator

import pytest
import torch

from tests.second_set import InPlace, Model, Sets, shows, version
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.stage.arena import Arena
from vllm.inflight.stage.twins import is_twinned, make_copy


@pytest.fixture
def sets() -> Iterator[Sets]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield Sets(arena)


def test_twins_keep_what_upstream_made_of_a_parameter(sets):
    assert is_twinned(sets.second) and not is_twinned(sets.live)
    assert sets.second.head.weight is sets.second.embed.weight
    assert sets.second.embed.weight.weight_loader == Model._load_embedding
    assert sets.second.attention.qkv.shape == sets.live.attention.qkv.shape


def test_an_update_shows_at_the_flip_and_not_before(sets):
    places = [param.data_ptr() for param in sets.live.parameters()]
    sets.stage(version(1).items())
    assert shows(sets.live, version(0))
    sets.arena.flip()
    assert shows(sets.live, version(1))
    sets.arena.flip()
    assert shows(sets.live, version(0))
    assert places == [param.data_ptr() for param in sets.live.parameters()]


def test_from_the_second_update_on_the_plan_does_without_the_loader(sets):
    for seed in range(1, 6):
        sets.stage(version(seed).items())
        assert shows(sets.live, version(seed - 1))
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert sets.second.num_loads == len(version(0))


def test_batches_of_a_transport_are_loaded_as_such(sets):
    class Batches:
        def __init__(self, seed: int) -> None:
            self._pairs = list(version(seed).items())

        def __iter__(self):
            raise AssertionError("one by one")

        def batches(self):
            yield self._pairs[:2]
            yield self._pairs[2:]

    for seed in (1, 2):
        sets.arena.settle()
        intake_weights = Batches(seed)
        sets.stage(intake_weights)
        sets.arena.flip()
        assert shows(sets.live, version(seed))


def test_what_ends_up_in_one_piece_is_received_in_place(sets):
    first = InPlace(version(1))
    sets.stage(first)
    assert not first.placed, "nothing is known before a loader has shown it"
    sets.arena.flip()
    for seed in (2, 3):
        weights = InPlace(version(seed))
        sets.stage(weights)
        assert weights.placed == set(version(seed))
        assert shows(sets.live, version(seed - 1))
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert sets.second.num_loads == len(version(0))


def test_a_version_that_is_refused_leaves_what_is_live_and_the_next_one_works(sets):
    sets.stage(version(1).items())
    sets.arena.flip()
    short = version(2)
    del short["attention.k"]
    with pytest.raises(WeightsMismatch, match=r"attention"):
        sets.stage(short.items())
    poisoned = version(2)
    poisoned["norm"][3] = torch.nan
    with pytest.raises(WeightsMismatch, match="NaN"):
        sets.stage(poisoned.items())
    assert shows(sets.live, version(1))
    sets.stage(version(3).items())
    sets.arena.flip()
    assert shows(sets.live, version(3))


def test_a_copy_is_of_the_same_form_and_content():
    tensor = torch.randn(6, 4).t()
    copy = make_copy(tensor)
    assert copy.stride() == tensor.stride()
    assert torch.equal(copy, tensor)
    assert copy.data_ptr() != tensor.data_ptr()
