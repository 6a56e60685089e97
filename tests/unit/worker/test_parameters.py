"""Shadow parameters in an arena: an update as on a GPU, on host memory."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.support.calm.engine_starts import thawed
from tests.support.shadow_on_host import (
    Batches,
    InPlace,
    Model,
    Sets,
    Wrapper,
    shows,
    version,
)
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.model.layers import layers
from vllm.inflight.worker.model.support import difference
from vllm.inflight.worker.shadow.flip import Copy
from vllm.inflight.worker.shadow.parameters import (
    is_mirrored,
    make_copy,
    make_hollow,
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield arena


@pytest.fixture
def sets(arena) -> Sets:
    return Sets(arena)


def test_shadow_parameters_keep_the_loaders_ties_and_shapes_of_the_live_ones(sets):
    assert is_mirrored(sets.second) and not is_mirrored(sets.live)
    assert sets.second.head.weight is sets.second.embed.weight
    assert sets.second.embed.weight.weight_loader == Model._load_embedding
    assert sets.second.attention.qkv.shape == sets.live.attention.qkv.shape


def test_a_hollow_tree_keeps_the_strides_of_views_with_gaps():
    """Shared-out experts have their second tree on the host, and not on `meta`."""
    trees = [torch.nn.Linear(8, 4, bias=False) for _ in range(2)]
    for tree in trees:  # as a half of a latent attention's weight
        half = torch.empty(4, 16, 8)[:, :8]
        tree.view = torch.nn.Parameter(half, requires_grad=False)
    make_hollow(*trees, torch.device("cpu"))
    for tree, is_meta in zip(trees, (False, True), strict=True):
        assert tree.view.is_meta is is_meta
        assert tree.view.stride() == (128, 8, 1)


def test_an_update_shows_at_the_flip_and_not_before(sets):
    places = [param.data_ptr() for param in sets.live.parameters()]
    sets.stage(version(1).items())
    assert shows(sets.live, version(0))
    sets.arena.flip()
    assert shows(sets.live, version(1))
    sets.arena.flip()
    assert shows(sets.live, version(0))
    assert places == [param.data_ptr() for param in sets.live.parameters()]


def test_layers_that_adapters_wrap_are_flipped_without_their_stacks(arena):
    sets = Sets(arena, wrapped=True)
    assert difference(sets.live, sets.second) is None
    stacks = [layer.lora_a_stacked for layer in (sets.live.embed, sets.live.attention)]
    for seed in (1, 2):
        sets.stage(version(seed).items())
        assert shows(sets.live, version(seed - 1))
        for stack in stacks:
            stack.fill_(seed)  # an adapter is loaded while a version is staged
        arena.flip()
        assert shows(sets.live, version(seed))
        assert all((stack == seed).all() for stack in stacks)
        assert not any(arena.contains(stack) for stack in stacks)


def test_wrapped_layers_are_copied_over_without_an_arena():
    live, second = Model(torch.empty), Model(torch.empty)
    live.load_weights(version(0).items())
    second.load_weights(version(1).items())
    live.embed, live.head = Wrapper(live.embed), Wrapper(live.head)
    copy = Copy(SimpleNamespace(live=live, module=second))
    for param, twin in copy._pairs:
        param.copy_(twin)
    assert shows(live, version(1))


def test_a_layer_that_is_tied_is_one_layer_however_often_it_is_wrapped():
    plain, wrapped = Model(torch.empty), Model(torch.empty)
    plain.head = plain.embed
    wrapped.embed, wrapped.head = Wrapper(wrapped.embed), Wrapper(wrapped.embed)
    assert [name for name, _ in layers(wrapped)] == [
        name for name, _ in plain.named_modules()
    ]
    assert dict(layers(wrapped))["embed"] is wrapped.embed.base_layer


def test_the_replay_plan_replaces_the_loader_from_the_third_update_on(sets):
    for seed in range(1, 6):
        sets.stage(version(seed).items())
        assert shows(sets.live, version(seed - 1))
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert sets.second.num_loads == 2 * len(version(0)), "recorded, and proved"


class Directed(TorchFunctionMode):
    """A default device, as staging has one; it counts what goes through it."""

    num_calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num_calls += func is not torch._C._set_grad_enabled
        return func(*args, **(kwargs or {}))


def test_new_loader_records_are_excluded_from_garbage_collection_once(
    sets,
):
    was_frozen = []
    with thawed():
        for seed in range(1, 6):
            made = [seed]  # whatever is there is frozen with the records
            sets.stage(InPlace(version(seed)))
            sets.arena.flip()
            looked_at = {id(each) for each in gc.get_objects()}
            records = [entry for _, entry in sets.shadow.plan.items()]
            assert records and looked_at.isdisjoint(map(id, records))
            was_frozen.append(id(made) not in looked_at)
    # When loaders were recorded, and when the first tensors were received in place.
    assert was_frozen == [True, True, False, False, False]


def test_a_replay_calls_no_function_that_follows_the_default_device(sets):
    calls = []
    for seed in (1, 2, 3):
        weights = Batches(version(seed))
        with Directed() as directed:
            sets.stage(weights)
        calls.append(directed.num_calls)
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert calls[0] > 0 == calls[2]


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


def test_a_tensor_that_is_stored_in_one_piece_is_received_in_place(sets):
    first = InPlace(version(1))
    sets.stage(first)
    assert not first.placed, "no loader has shown it"
    sets.arena.flip()
    for seed in (2, 3, 4):
        weights = InPlace(version(seed))
        sets.stage(weights)
        assert weights.placed == set(version(seed))
        assert shows(sets.live, version(seed - 1))
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert sets.second.num_loads == 2 * len(version(0))


def test_a_rejected_version_keeps_the_live_weights_and_the_next_update_works(sets):
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
