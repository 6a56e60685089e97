"""Twins in an arena: what a GPU does at an update, on the arena's twin of the host.

Intake, plan, twins and the flip of pages are the code that runs on a GPU; only the
memory is the host's.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.stage.arena import Arena
from vllm.inflight.stage.intake import Intake
from vllm.inflight.stage.plan import Plan
from vllm.inflight.stage.twins import is_twinned, make_copy, put_twins
from vllm.inflight.update import Manifest

HIDDEN, VOCABULARY, PADDED = 16, 10, 12
SHARDS = {"q": 0, "k": 1, "v": 2}


class Model(torch.nn.Module):
    """Fused and padded parameters, a tied head, and loaders as upstream's."""

    def __init__(self, empty) -> None:
        super().__init__()
        self.num_loads = 0
        self.embed, self.attention, self.head = (torch.nn.Module() for _ in range(3))
        weight = torch.nn.Parameter(empty((PADDED, HIDDEN)), requires_grad=False)
        weight.weight_loader = self._load_embedding
        self.embed.weight = self.head.weight = weight
        fused = torch.nn.Parameter(empty((3 * HIDDEN, HIDDEN)), requires_grad=False)
        fused.weight_loader = self._load_shard
        self.attention.qkv = fused
        self.norm = torch.nn.Parameter(empty((HIDDEN,)), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.num_loads += 1
            if name.startswith("attention."):
                param = self.attention.qkv
                param.weight_loader(param, tensor, SHARDS[name[-1]])
            elif name == "embed.weight":
                param = self.embed.weight
                param.weight_loader(param, tensor)
            elif name == "norm":
                getattr(self.norm, "weight_loader", _load_whole)(self.norm, tensor)

    @staticmethod
    def _load_embedding(param, tensor):
        param.data[:VOCABULARY].copy_(tensor)
        param.data[VOCABULARY:].fill_(0)

    @staticmethod
    def _load_shard(param, tensor, shard):
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(tensor)


def _load_whole(param, tensor):
    param.data.copy_(tensor)


def version(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    shapes |= {f"attention.{shard}": (HIDDEN, HIDDEN) for shard in SHARDS}
    return {n: torch.randn(s, generator=random) for n, s in shapes.items()}


def shows(model: Model, named: dict[str, torch.Tensor]) -> bool:
    fused = torch.cat([named[f"attention.{shard}"] for shard in SHARDS])
    return (
        torch.equal(model.embed.weight[:VOCABULARY], named["embed.weight"])
        and not model.embed.weight[VOCABULARY:].any()
        and torch.equal(model.attention.qkv, fused)
        and torch.equal(model.norm, named["norm"])
    )


class Sets:
    """A model in an arena, its second set, and updates of it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.live = Model(arena.empty)
        self.live.load_weights(version(0).items())
        arena.consolidate()
        arena.pair()
        with torch.device("meta"):
            self.second = Model(torch.empty)
        put_twins(self.live, self.second, arena.twin)
        self.shadow = SimpleNamespace(
            module=self.second,
            device=torch.device("cpu"),
            required={n: p.shape for n, p in self.second.named_parameters()},
            known_names=lambda: {
                n: (list(t.shape), "float32") for n, t in version(0).items()
            },
            asks_loader=False,
            spares=(),
            plan=(plan := Plan()),
            place=plan.place,
            tables={},
            views={},
        )

    def stage(self, weights) -> None:
        self.arena.settle()
        intake = Intake(
            self.shadow,
            Manifest(),
            verify=True,
            allow_nonfinite=False,
            cancelled=lambda: False,
            progress=lambda num_bytes, num_tensors: None,
        )
        intake.watch()
        try:
            self.second.load_weights(weights)
            intake.verdict()
        finally:
            intake.unwatch()


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


class InPlace:
    """A transport that writes where it is told to, where it is told."""

    def __init__(self, seed: int) -> None:
        self._named = version(seed)
        self.placed: set[str] = set()

    def into(self, place) -> None:
        for name, tensor in self._named.items():
            if (home := place(name, tuple(tensor.shape), tensor.dtype)) is not None:
                home.tensor.copy_(tensor)
                self._named[name] = home.tensor
                self.placed.add(name)

    def __iter__(self):
        return iter(self._named.items())


def test_what_ends_up_in_one_piece_is_received_in_place(sets):
    first = InPlace(1)
    sets.stage(first)
    assert not first.placed, "nothing is known before a loader has shown it"
    sets.arena.flip()
    for seed in (2, 3):
        weights = InPlace(seed)
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
