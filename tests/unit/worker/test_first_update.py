"""With two sets of weights, the first update is replayed: its plan is of the start.

What cannot be recorded or proved then is loaded by the first update, and recorded.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.support.shadow_on_host import (
    HIDDEN,
    SHARDS,
    Batches,
    InPlace,
    Model,
    Sets,
    shows,
    start_checkpoint,
    version,
)
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.worker import replay_check
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.replay_plan import Plan
from vllm.inflight.worker.staging import destination_table
from vllm.inflight.worker.staging.destination_table import fill_table

EVERYTHING = len(version(0))


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield arena


def started(arena: Arena, kind: type[torch.nn.Module] = Model, **options) -> Sets:
    """An engine that knows its start checkpoint; no loader has been called since."""
    sets = Sets(arena, kind=kind, traced=True, **options)
    sets.second.num_loads = 0
    return sets


def update(sets: Sets, seed: int, kind=dict.items, **options) -> None:
    sets.stage(kind(version(seed)), **options)
    sets.stager.flip()
    assert shows(sets.live, version(seed))


@pytest.mark.parametrize("kind", [dict.items, InPlace, Batches])
@pytest.mark.parametrize("is_reversible", [True, False], ids=["arena", "copies"])
def test_the_first_update_calls_no_loader(arena, kind, is_reversible):
    sets = started(arena, is_reversible=is_reversible)
    assert sets.shadow.plan.is_checked
    update(sets, 1, kind)
    assert sets.second.num_loads == 0
    assert sets.stager.versions.served is not None


def test_a_tensor_of_the_first_update_is_received_in_its_final_place(arena):
    sets = started(arena)
    sets.stage(incoming := InPlace(version(1)))
    assert incoming.placed == version(0).keys()
    assert sets.intake.num_in_place == EVERYTHING


def test_the_start_leaves_the_shadow_weights_as_they_were(arena):
    sets = Sets(arena)
    before = {name: param for name, param in sets.second.named_parameters()}
    content = {name: param.clone() for name, param in before.items()}
    addresses = {name: param.data_ptr() for name, param in before.items()}
    sets.shadow.start_checkpoint = start_checkpoint(version(0))
    assert fill_table(sets.shadow) is None
    after = dict(sets.second.named_parameters())
    assert sets.second.head.weight is sets.second.embed.weight
    assert sets.shadow.stale == set()
    assert "load_weights" not in vars(sets.second)
    for name, param in after.items():
        assert param is before[name] and param.data_ptr() == addresses[name]
        assert torch.equal(param, content[name])
    for _, entry in sets.shadow.plan.items():
        for copied in entry.copies:
            home = after[copied.param].untyped_storage().data_ptr()
            assert copied.target.untyped_storage().data_ptr() == home


@pytest.mark.parametrize("names", [("norm",), [f"attention.{n}" for n in SHARDS]])
def test_a_first_subset_is_replayed_and_the_rest_stays(arena, names):
    sets = started(arena)
    some = {name: version(1)[name] for name in names}
    assert sets.stage(some.items(), names) == 0, "nothing differs from what is served"
    sets.stager.flip()
    assert shows(sets.live, version(0) | some)
    assert sets.second.num_loads == 0


def test_after_a_first_update_that_is_damaged_the_next_one_works(arena):
    sets = started(arena)
    damaged = version(1)
    damaged["attention.k"][0, 0] = float("nan")
    with pytest.raises(WeightsMismatch):
        sets.stage(damaged.items())
    assert shows(sets.live, version(0))
    update(sets, 2)
    assert sets.second.num_loads == 0


def test_after_a_first_update_that_breaks_off_a_subset_brings_no_part_of_it(arena):
    sets = started(arena)
    with pytest.raises(ConnectionError):
        sets.stage(InPlace(version(1), num_good=3))
    some = {"norm": version(2)["norm"]}
    sets.stage(some.items(), ["norm"])
    sets.stager.flip()
    assert shows(sets.live, version(0) | some)


class Computing(Model):
    """Its loader computes what it writes of the norm."""

    def __init__(self, empty) -> None:
        super().__init__(empty)
        self.norm.weight_loader = lambda param, t: param.data.copy_(t + 0)


def test_what_a_loader_computes_is_loaded_at_every_update(arena):
    sets = started(arena, Computing)
    assert sets.shadow.plan.known("norm") is None
    for seed in (1, 2, 3):
        update(sets, seed)
        assert sets.second.num_loads == seed


class Moody(Model):
    """Its loader swaps two shards when it is called for the first time."""

    def _load_shard(self, param, tensor, shard):
        is_first = self.num_loads <= EVERYTHING and param.is_meta
        shard = {0: 1, 1: 0}.get(shard, shard) if is_first else shard
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(tensor)


def test_a_record_of_the_start_that_is_wrong_is_not_replayed(arena, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(
        replay_check.logger, "error", lambda text, *args: told.append(text % args)
    )
    sets = started(arena, Moody)
    (line,) = told
    assert "2 tensors (attention.k, attention.q)" in line
    assert "the first update" in line and "report this" in line
    assert sets.shadow.plan.known("attention.q") is None
    assert sets.shadow.plan.known("attention.v").is_proved
    update(sets, 1)
    assert sets.second.num_loads == 2
    assert sets.shadow.plan.known("attention.q") is not None, "recorded by the update"
    for seed in (2, 3):
        update(sets, seed)
    assert sets.shadow.plan.is_checked and sets.shadow.plan.num_proved == EVERYTHING


class Fussy(Model):
    """Its loader reads a parameter, which has no content while it is recorded."""

    @staticmethod
    def _load_embedding(param, tensor):
        float(param.data.sum())
        Model._load_embedding(param, tensor)


def test_what_a_loader_does_not_take_at_the_start_is_loaded(arena):
    sets = started(arena, Fussy)
    assert sets.shadow.plan.known("embed.weight") is None
    assert sets.shadow.plan.num_proved == EVERYTHING - 1
    update(sets, 1)
    assert sets.second.num_loads == 1
    update(sets, 2)
    update(sets, 3)
    assert sets.shadow.plan.num_proved == EVERYTHING


class FussyShard(Model):
    """Its loader does not take one part of a parameter before it has content."""

    def _load_shard(self, param, tensor, shard):
        if shard == SHARDS["k"]:
            float(param.data.sum())
        param.data.narrow(0, shard * HIDDEN, HIDDEN).copy_(tensor)


def test_other_tensors_of_a_parameter_that_was_not_recorded_whole_are_loaded(arena):
    """It is not known whether the tensors write the same elements."""
    sets = started(arena, FussyShard)
    proved = {name for name, entry in sets.shadow.plan.items() if entry.is_proved}
    assert proved == {"embed.weight", "norm"}
    for seed in (1, 2, 3):
        update(sets, seed)
    assert sets.shadow.plan.num_proved == EVERYTHING


class Unnamed(Model):
    """Its loader rejects a tensor before it says which parameter it would fill."""

    def load_weights(self, weights) -> None:
        def each():
            for name, tensor in weights:
                if name == "norm":
                    float(self.attention.qkv.sum())
                yield name, tensor

        super().load_weights(each())


def test_nothing_of_a_start_is_replayed_if_a_tensor_may_fill_any_parameter(arena):
    sets = started(arena, Unnamed)
    sets.shadow.places.params_of = lambda name: set()
    sets.shadow.plan = Plan()
    assert fill_table(sets.shadow) is None
    assert len(sets.shadow.plan) == 0 and sets.shadow.plan.is_replayed
    for seed in (1, 2, 3):
        update(sets, seed)
    assert sets.shadow.plan.num_proved == EVERYTHING


class Adding(Model):
    """Its loader fills a parameter itself when all tensors have come."""

    def __init__(self, empty) -> None:
        super().__init__(empty)
        self.bias = torch.nn.Parameter(empty((HIDDEN,)), requires_grad=False)

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        getattr(self.bias, "weight_loader", _copy)(
            self.bias, torch.full((HIDDEN,), 7.0)
        )


def _copy(param, tensor):
    param.data.copy_(tensor)


def test_nothing_is_replayed_if_the_loader_adds_tensors(arena):
    sets = started(arena, Adding)
    assert len(sets.shadow.plan) == 0 and sets.shadow.plan.is_replayed
    for seed in (1, 2):
        update(sets, seed)
        assert (sets.live.bias == 7).all()
    assert not sets.shadow.plan.is_replayed, "as the first update has found out"


class Ending(Model):
    """Its loader fails when all tensors have come, if one has no content."""

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        float(self.norm.sum())


def test_nothing_is_replayed_if_the_loader_fails_at_its_end(arena):
    sets = started(arena, Ending)
    assert len(sets.shadow.plan) == 0 and sets.shadow.plan.is_replayed
    for seed in (1, 2, 3):
        update(sets, seed)
    assert sets.shadow.plan.num_proved == EVERYTHING


def test_a_record_that_fails_leaves_the_engine_as_it_was_without(arena, monkeypatch):
    def fail(self: destination_table.Trace) -> bool:
        raise torch.OutOfMemoryError("no memory")

    told: list[str] = []
    monkeypatch.setattr(destination_table.Trace, "run", fail)
    warning = destination_table.logger.warning
    monkeypatch.setattr(
        destination_table.logger,
        "warning",
        lambda text, *args, **options: told.append(text) or warning(text, *args),
    )
    sets = started(arena)
    assert told == ["the replay plan is left to the first update"]
    for seed in (1, 2, 3):
        update(sets, seed)
        assert sets.second.num_loads == (EVERYTHING if seed == 1 else 2 * EVERYTHING)
    assert sets.shadow.plan.num_proved == EVERYTHING


def test_without_room_for_patterns_the_first_update_proves_the_plan(arena):
    sets = Sets(arena)
    shadow = sets.shadow
    shadow.start_checkpoint = start_checkpoint(version(0))
    shadow.spare_bytes = lambda: 0
    assert fill_table(shadow) is None
    assert len(shadow.plan) == EVERYTHING and shadow.plan.num_proved == 0
    update(sets, 1, Batches)
    assert shadow.plan.num_proved == sets.intake.num_in_place == EVERYTHING


def test_the_first_update_proves_what_the_start_had_no_time_for(arena, monkeypatch):
    monkeypatch.setattr(replay_check, "BATCH_BYTES", 1)
    monkeypatch.setattr(destination_table, "MOST_PROOF_S", 0)
    sets = started(arena)
    plan = sets.shadow.plan
    assert plan.num_proved == 0 and len(plan) == EVERYTHING
    update(sets, 1, Batches)
    assert plan.is_checked and plan.num_proved == EVERYTHING
    assert sets.intake.num_in_place == EVERYTHING


def test_only_what_there_was_no_room_for_is_left_to_the_first_update(
    arena, monkeypatch
):
    monkeypatch.setattr(replay_check, "BATCH_BYTES", 1)
    sets = Sets(arena)
    shadow = sets.shadow
    shadow.start_checkpoint = start_checkpoint(version(0))
    most = sets.second.attention.qkv.nbytes + 2 * 4 * HIDDEN * HIDDEN
    shadow.spare_bytes = lambda: replay_check.MARGIN_BYTES + most
    assert fill_table(shadow) is None
    unproved = {n for n, entry in shadow.plan.items() if not entry.is_proved}
    assert unproved == {f"attention.{shard}" for shard in SHARDS}
    update(sets, 1, Batches)
    assert shadow.plan.num_proved == EVERYTHING


def test_a_tensor_of_another_form_than_at_the_start_is_loaded(arena):
    sets = started(arena)
    named = version(1)
    named["norm"] = named["norm"].to(torch.bfloat16)
    sets.shadow.asks_loader = True
    sets.shadow.start_checkpoint = start_checkpoint({})
    sets.stage(named.items())
    sets.stager.flip()
    assert shows(sets.live, named)
    assert sets.second.num_loads == 1


class Ends(Model):
    """Its loader acts after its last tensor, as one that fuses parameters does."""

    def load_weights(self, weights) -> None:
        super().load_weights(weights)
        self.seen = [*getattr(self, "seen", []), self.norm.data.clone()]


def test_a_loader_gets_to_its_end_once_when_all_tensors_were_replayed(arena):
    sets = started(arena, Ends)
    sets.second.seen = []
    sets.stage(version(1).items())
    assert sets.second.num_loads == 0
    (norm,) = sets.second.seen
    assert torch.equal(norm, version(1)["norm"])
