"""Deltas on shadow parameters in an arena: a GPU's code, on the host's memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.deltas import integers
from tests.support.shadow_on_host import Sets, shows, version
from vllm.inflight import ops
from vllm.inflight.delta import Encoder
from vllm.inflight.delta.parts import named
from vllm.inflight.engine.update.cut_tensors import problem
from vllm.inflight.engine.update.ranks import agree
from vllm.inflight.errors import (
    Cancelled,
    DeltaUnsupported,
    Malformed,
    WeightsMismatch,
)
from vllm.inflight.messages import Status
from vllm.inflight.update import Manifest, TensorSpec
from vllm.inflight.worker.delta.shares import NUM, held_by_several, share
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.verify.drift import Sampler, Samples, drift
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors

Weights = dict[str, torch.Tensor]


@pytest.fixture
def sets() -> Iterator[Sets]:
    """Two sets that have loaded two whole versions, so that their plan is proved."""
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield started(arena)


def started(arena: Arena, *, is_reversible: bool = True) -> Sets:
    sets = Sets(arena, is_reversible=is_reversible)
    for seed in (9, 1):
        sets.stage(version(seed).items())
        sets.stager.flip()
    return sets


def stepped(weights: Weights, seed: int, share: float = 0.05) -> Weights:
    """The weights after a step that changes a share of their elements."""
    random = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in weights.items():
        chosen = torch.rand(tensor.shape, generator=random) < share
        new[name] = torch.where(chosen, tensor * 1.01, tensor)
    return new


def delta(old: Weights, new: Weights, base: str) -> tuple[Manifest, Weights]:
    """The manifest and the parts of what differs."""
    encoder, parts = Encoder(64 << 10), []
    specs: dict[str, TensorSpec] = {}
    for name, tensor in new.items():
        parts += encoder.add(len(specs), old[name], tensor)
        if encoder.has_changed:
            digest = ops.digest([tensor])[0].hex()
            specs[name] = TensorSpec(name, tuple(tensor.shape), "float32", digest)
    parts += encoder.finish()
    return Manifest(specs, base=base), dict(named(parts))


def staged(sets: Sets, old: Weights, new: Weights) -> None:
    served = sets.stager.served
    assert served is not None
    manifest, parts = delta(old, new, served.digest())
    sets.stage(parts.items(), manifest=manifest)


def digest(weights: Weights) -> str:
    return ops.manifest_digest(
        (n, "float32", tuple(t.shape), ops.digest([t])[0]) for n, t in weights.items()
    )


MOVES = st.lists(
    st.sampled_from(
        [
            *("delta", "delta", "delta"),
            *("aborted delta", "wrong delta", "cancelled delta"),
            *("whole", "norm alone", "rollback"),
        ]
    ),
    max_size=14,
)


@settings(deadline=None, max_examples=100)
@given(MOVES, st.booleans())
def test_any_sequence_of_updates_equals_a_model_of_dictionaries(moves, is_reversible):
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = started(arena, is_reversible=is_reversible)
        served, before = version(1), None
        for seed, move in enumerate(moves, 20):
            new = stepped(served, seed)
            if move == "rollback":
                if before is None:
                    continue
                sets.stager.flip("before")
                served, before = before, served
            else:
                before = None
                if take(sets, move, served, new, seed):
                    if move == "whole":
                        new = version(seed)
                    elif move == "norm alone":
                        new = served | {"norm": new["norm"]}
                    assert shows(sets.second, new)
                    assert shows(sets.live, served)
                    sets.stager.flip()
                    before = served if is_reversible else None
                    served = new
            assert shows(sets.live, served)
            assert sets.stager.served.digest() == digest(served)


def take(sets: Sets, move: str, served: Weights, new: Weights, seed: int) -> bool:
    """Stage one update; whether it is staged."""
    if move == "whole":
        sets.stage(version(seed).items())
        return True
    if move == "norm alone":
        sets.stage([("norm", new["norm"])], ["norm"])
        return True
    manifest, parts = delta(served, new, sets.stager.served.digest())
    if move == "delta":
        sets.stage(parts.items(), manifest=manifest)
        return True
    with suppress(Cancelled, WeightsMismatch, ConnectionError, Malformed):
        if move == "wrong delta":
            parts["delta.0.data"][-9] ^= 4
        if move == "cancelled delta":

            def between(num_bytes: int) -> None:
                raise Cancelled("the update was aborted")

            sets.between = between
        sets.stage(broken(parts, move), manifest=manifest)
        assert move == "cancelled delta", "a broken delta was staged"
        sets.stager.open()  # nothing had to be copied; it is aborted later
    sets.between = Sets.between
    return False


def broken(parts: Weights, move: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield from parts.items()
    if move == "aborted delta":
        raise ConnectionError("the wire broke")


def offsets_of(sets: Sets, param: str) -> list[int]:
    """The noted elements of a parameter."""
    return [
        offset
        for log in sets.shadow.changed
        for name, first, end, _ in log.stretches
        if name == param
        for offset in log.offsets[first:end].tolist()
    ]


def test_the_sets_differ_in_the_noted_elements_and_no_others(sets):
    old = version(1)
    staged(sets, old, stepped(old, 4))  # it is not committed
    staged(sets, old, stepped(old, 5))
    assert not sets.shadow.stale
    for name, param in sets.second.named_parameters():
        differ = param.data != sets.live.get_parameter(name)
        noted = offsets_of(sets, name)
        assert differ.view(-1).nonzero().flatten().tolist() == sorted(noted)


def test_what_the_next_delta_brings_up_is_what_the_last_one_changed(sets):
    old = version(1)
    for seed in range(3):
        new = stepped(old, seed)
        staged(sets, old, new)
        sets.stager.flip()
        old = new
    copied: list[int] = []
    sets.between = copied.append
    params = dict(sets.live.named_parameters())
    num_changed = sum(len(offsets_of(sets, name)) for name in params)
    staged(sets, old, stepped(old, 7))
    assert copied[-1] == 4 * num_changed
    assert copied[-1] < sum(param.nbytes for param in params.values()) / 4


def test_the_drift_of_a_delta_is_that_of_whole_versions(sets):
    old, new = version(1), stepped(version(1), 5)
    told: list[Any] = []
    sets.stager.staged = told.append
    staged(sets, old, new)
    expected = drift(samples_of(old), samples_of(new))
    assert expected and expected["overall"]
    assert drift(sets.stager.served.samples, told[0].samples) == expected


def samples_of(weights: Weights) -> Samples:
    sampler = Sampler()
    sampler.add(sorted(weights.items()))
    return sampler.samples()


def test_deltas_go_under_the_layers_of_adapters():
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets, old = Sets(arena, wrapped=True), version(1)
        for seed in (9, 1):
            sets.stage(version(seed).items())
            sets.stager.flip()
        for seed in range(2):
            new = stepped(old, seed)
            staged(sets, old, new)
            assert shows(sets.second, new)
            sets.stager.flip()
            old = new


TIED, UNUSED = "lm_head.weight", "rotary_emb.inv_freq"


@pytest.fixture
def with_head(sets: Sets) -> Sets:
    """Two sets whose trainer sends the tied head too, and a buffer that is not used."""
    sets.shadow.ignored = IgnoredTensors((".inv_freq",), ("",), has_tied_head=True)
    sets.stage(headed(version(1)).items())
    sets.stager.flip()
    return sets


def headed(weights: Weights, unused: int = 0) -> Weights:
    head = weights["embed.weight"].clone()
    return weights | {TIED: head, UNUSED: torch.full((5,), float(unused))}


def test_a_delta_of_tensors_without_a_use_takes_their_digests(with_head: Sets):
    old = headed(version(1))
    for seed in range(3):
        new = headed(stepped(version(1), seed), seed)
        staged(with_head, old, new)
        assert not with_head.intake.unfilled
        assert shows(with_head.second, new)
        with_head.stager.flip()
        assert with_head.stager.served.digest() == digest(new)
        old = new


def test_a_tied_head_has_the_drift_of_its_embedding(with_head: Sets):
    new = headed(stepped(version(1), 5))
    staged(with_head, headed(version(1)), new)
    served = with_head.stager.served
    brought = with_head.stager.versions.staged.content.samples
    expected = drift(served.samples, samples_of(new))
    assert expected["overall"] and drift(served.samples, brought) == expected


@pytest.mark.parametrize("alone", ["embed.weight", TIED])
def test_a_tied_head_that_does_not_follow_its_embedding_is_rejected(
    with_head: Sets, alone: str
):
    old = headed(version(1))
    new = old | {alone: headed(stepped(version(1), 5))[alone]}
    with pytest.raises(WeightsMismatch, match=f"{TIED}.*differs from the embedding"):
        staged(with_head, old, new)
    new = headed(stepped(version(1), 6))
    staged(with_head, old, new)
    assert shows(with_head.second, new)


def test_a_log_that_grows_too_long_is_given_up(sets):
    old = version(1)
    sets.shadow.nbytes = 16 * 400  # of 4 bytes, 100 elements
    for seed in range(3):
        new = stepped(old, seed, share=0.5)
        staged(sets, old, new)
        assert not sets.shadow.changed
        assert sets.shadow.stale == dict(sets.second.named_parameters()).keys()
        assert shows(sets.second, new)
        sets.stager.flip()
        old = new


def test_a_part_that_changes_too_many_elements_is_rejected(sets, monkeypatch):
    monkeypatch.setattr("vllm.inflight.worker.delta.order.MOST_ENTRIES", 9)
    with pytest.raises(Malformed, match="at most 9 are decoded at once"):
        staged(sets, version(1), stepped(version(1), 5))


def test_a_tensor_that_is_no_copy_is_named(sets):
    manifest, parts = delta(version(1), stepped(version(1), 5), "")
    sets.shadow.plan.reject(["attention.k"])
    with pytest.raises(DeltaUnsupported, match=r"attention\.k"):
        sets.stage(parts.items(), manifest=manifest)


def test_a_repeated_part_is_rejected(sets):
    manifest, parts = delta(version(1), stepped(version(1), 5), "")
    with pytest.raises(Malformed, match="sent twice"):
        sets.stage([*parts.items(), *parts.items()], manifest=manifest)


def test_nan_is_counted_among_the_changed_elements_alone(sets):
    new = stepped(version(1), 5)
    new["norm"][3] = torch.nan
    with pytest.raises(WeightsMismatch, match="norm: 1 of its changed elements"):
        staged(sets, version(1), new)


def test_an_announced_change_that_did_not_come_is_named(sets):
    new = stepped(version(1), 5)
    manifest, _ = delta(version(1), new, "")
    (*_, last) = new
    _, parts = delta(version(1), new | {last: version(1)[last]}, "")
    with pytest.raises(WeightsMismatch, match=f"{last}: the manifest announces a chan"):
        sets.stage(parts.items(), manifest=manifest)


NAMES = ("rows", "columns", "norm")


class Rank:
    """A model of which this rank has a half of each matrix, as ranks load it.

    Args:
        half: which one.
        names: the tensors that it has, as a pipeline stage has some of them.

    """

    def __init__(self, half: int, names: Sequence[str] = NAMES) -> None:
        self.half, self.names = half, names

    def __call__(self, empty: Any) -> torch.nn.Module:
        half, names = self.half, self.names
        shapes = {"rows": (8, 16), "columns": (16, 8), "norm": (16,)}

        class Half(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for name in names:
                    param = torch.nn.Parameter(empty(shapes[name]), requires_grad=False)
                    setattr(self, name, param)

            def load_weights(self, weights) -> None:
                for name, tensor in weights:
                    if name in names:
                        param = getattr(self, name)
                        load = getattr(param, "weight_loader", self.load)
                        load(param, tensor)

            @staticmethod
            def load(param, tensor) -> None:
                for dim in range(tensor.dim()):
                    size = param.shape[dim]
                    if size < tensor.shape[dim]:
                        tensor = tensor.narrow(dim, half * size, size)
                param.data.copy_(tensor)

        made = Half()
        for param in made.parameters():
            param.weight_loader = made.load
        return made


def halves(seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)
    shapes = {"rows": (16, 16), "columns": (16, 16), "norm": (16,)}
    return {n: torch.randn(s, generator=random) for n, s in shapes.items()}


NEW = stepped(halves(2), 3, share=0.3)
AT = next(
    place
    for place in range(8 * 16)
    if all(
        new.view(-1)[place] != old.view(-1)[place]
        for new, old in zip(
            NEW["rows"].chunk(2), halves(2)["rows"].chunk(2), strict=True
        )
    )
)
"""An element of both halves of the rows that changes."""


def statuses_of(
    ranks: Sequence[Rank],
    tp_size: int,
    unused: tuple[str, ...] = (),
    off: Mapping[int, int] = {},
) -> list[Status]:
    """What these ranks report of a delta, after each has served two versions.

    The engine has no use for the tensors `unused`. On a rank of `off`, an element that
    the delta changes has been off by so many units in the last place before.
    """
    statuses = []
    with ExitStack() as open_arenas:
        for number, rank in enumerate(ranks):
            arena = open_arenas.enter_context(Arena.open(torch.device("cpu"), 1 << 26))
            first = {n: t for n, t in halves(0).items() if n in rank.names}
            sets = Sets(arena, kind=rank, first=first)
            shadow = sets.shadow
            shadow.is_alone, shadow.is_whole_over_ranks = False, True
            shadow.tp_size, shadow.has_all = tp_size, rank.names == NAMES
            shadow.asks_loader = rank.names != NAMES
            shadow.ignored = IgnoredTensors(unused)
            for seed in (1, 2):
                sets.stage(halves(seed).items())
                sets.stager.flip()
            manifest, parts = delta(halves(2), NEW, sets.stager.served.digest())
            for module in (sets.live, sets.second) if number in off else ():
                bits = integers(module.rows.data)
                bits[AT] += off[number]
            sets.stage(parts.items(), manifest=manifest)
            # Each rank knows the drift of tensors that it serves a part of.
            assert (
                drift(samples_of(NEW), sets.stager.versions.staged.content.samples)[
                    "overall"
                ]
                == 0
            )
            shares, unfilled = sets.intake.shares, sets.intake.unfilled
            assert unfilled == [n for n in NEW if n not in (*rank.names, *unused)]
            statuses.append(
                Status(sent="a", digest="b", shares=shares, unfilled=unfilled)
            )
            for name, dim in (("rows", 0), ("columns", 1)):
                if name in rank.names:
                    half = NEW[name].chunk(2, dim)[rank.half]
                    assert torch.equal(sets.second.get_parameter(name), half)
            if "norm" in rank.names:
                assert torch.equal(sets.second.norm, NEW["norm"])
    return statuses


def wrong_in(status: Status, column: int) -> Status:
    shares = list(status.shares or ())
    shares[column] ^= 1 << 40
    return replace(status, shares=shares)


def test_the_shares_of_two_ranks_prove_what_is_cut_over_them():
    statuses = statuses_of([Rank(0), Rank(1)], 2)
    assert agree(statuses) == "b"
    first, second = statuses
    for column in range(4):
        assert isinstance(agree([first, wrong_in(second, column)]), WeightsMismatch)
    assert isinstance(agree([first, replace(second, shares=None)]), WeightsMismatch)
    assert isinstance(agree([first, first]), WeightsMismatch | DeltaUnsupported)


def test_the_shares_of_ranks_that_hold_the_same_parts_count_each_holder():
    """As two ranks hold one KV head, where there are fewer heads than ranks."""
    statuses = statuses_of([Rank(0), Rank(0), Rank(1), Rank(1)], 4)
    assert agree(statuses) == "b"
    for index in range(4):
        changed = list(statuses)
        changed[index] = wrong_in(statuses[index], 0)
        assert isinstance(agree(changed), WeightsMismatch)
    # One part three times, and another one once.
    first, *_, last = statuses
    uneven = agree([first, first, first, last])
    assert isinstance(uneven, WeightsMismatch | DeltaUnsupported)


def test_faults_of_two_holders_of_one_part_are_found_although_they_cancel_in_the_sum():
    ranks = [Rank(0), Rank(0), Rank(1), Rank(1)]
    good = statuses_of(ranks, 4)
    for off in ({0: 7, 1: -7}, {2: -1, 3: 1}):
        bad = statuses_of(ranks, 4, off=off)
        assert sum_of(bad) == sum_of(good)
        error = agree(bad)
        assert isinstance(error, WeightsMismatch)
        assert f"ranks {min(off)}, {max(off)} hold the same parts" in str(error)


def test_ranks_may_share_one_tensor_in_pairs_and_another_in_other_pairs():
    terms = {
        name: [(name, ops.Digest(at + half, half), 5) for half in (1, 2)]
        for at, name in ((10, "rows"), (20, "columns"))
    }
    whole = [
        ("rows", ops.Digest(2 * (11 + 12), 2 * (1 + 2)), 20),
        ("columns", ops.Digest(2 * (21 + 22), 2 * (1 + 2)), 20),
    ]

    def told(rank: int, off: int = 0) -> list[int]:
        of_rows, of_columns = terms["rows"][rank // 2], terms["columns"][rank % 2]
        name, (a, b), num = of_columns
        found = [of_rows, (name, ops.Digest(a + off, b), num)]
        parts = ("rows", rank // 2), ("columns", rank % 2)
        held = [(2, part, term) for part, term in zip(parts, found, strict=True)]
        return share(found) + share(whole) + held_by_several(held)

    assert problem([told(rank) for rank in range(4)]) is None
    error = problem([told(0, 1), told(1), told(2, -1), told(3)])
    assert isinstance(error, WeightsMismatch)
    assert "ranks 0, 2 hold the same parts" in str(error)


def sum_of(statuses: list[Status]) -> list[int]:
    """The sum of the shares of ranks."""
    shares = [(status.shares or ())[:NUM] for status in statuses]
    return [sum(column) % 2**64 for column in zip(*shares, strict=True)]


def test_the_shares_of_pipeline_stages_prove_the_tensors_of_each():
    first, last = ("rows",), ("columns", "norm")
    ranks = [Rank(0, first), Rank(1, first), Rank(0, last), Rank(1, last)]
    statuses = statuses_of(ranks, 2)
    assert agree(statuses) == "b"
    for index in range(4):
        changed = list(statuses)
        changed[index] = wrong_in(statuses[index], 1)
        assert isinstance(agree(changed), WeightsMismatch)


def test_stages_that_hold_the_same_tensor_prove_it_each():
    """As a tied embedding is on the first stage and on the last."""
    first, second = statuses_of([Rank(0), Rank(1)], 2)
    assert agree([first, second, first, second]) == "b"
    wrong = wrong_in(second, 0)
    assert isinstance(agree([first, second, first, wrong]), WeightsMismatch)


def test_a_tensor_that_no_rank_serves_is_not_changed_by_a_delta_unless_unused():
    names = ("rows", "columns")
    ranks = Rank(0, names), Rank(1, names)
    assert agree(statuses_of(ranks, 2, unused=("norm",))) == "b"
    error = agree(statuses_of(ranks, 2))
    assert isinstance(error, DeltaUnsupported)
    assert error.tensors == ("norm",) or error.tensors == ["norm"]
