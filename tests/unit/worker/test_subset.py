"""What a subset leaves alone is what is served, whatever became of those before it.

Intake, plan, remainder and flip as on a GPU, on memory of the host, against a model
that is two dictionaries.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.shadow_on_host import InPlace, Sets, shows, version
from vllm.inflight import ops
from vllm.inflight.errors import Cancelled, WeightsMismatch
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.verify.drift import Sampler, drift

GROUPS = {"embed*": 1, "attention.*": 3, "norm": 1}
"""Pattern → tensors; each fills one parameter."""
PARAMS = {"embed*": "embed.weight", "attention.*": "attention.qkv", "norm": "norm"}

UPDATES = st.tuples(
    st.lists(st.sampled_from(sorted(GROUPS)), unique=True, max_size=3),  # none: whole
    st.sampled_from(["commit", "commit", "commit", "abort", "break", "cancel"]),
    st.integers(0, 4),  # where it breaks
    st.booleans(),  # whether tensors are received in place
)


@pytest.fixture
def sets() -> Iterator[Sets]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield Sets(arena)


def of(named: dict[str, torch.Tensor], patterns: list[str]) -> dict[str, torch.Tensor]:
    starts = tuple(pattern.rstrip("*") for pattern in patterns)
    return {n: t for n, t in named.items() if n.startswith(starts)}


def digest(named: dict[str, torch.Tensor]) -> str:
    return ops.manifest_digest(
        (n, "float32", tuple(t.shape), ops.digest([t])[0]) for n, t in named.items()
    )


def how_far(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> Any:
    samplers = [Sampler(), Sampler()]
    for sampler, named in zip(samplers, (old, new), strict=True):
        sampler.add(sorted(named.items()))
    overall = drift(*(sampler.samples() for sampler in samplers))
    return overall and overall["overall"]


def differing(sets: Sets) -> set[str]:
    """The parameters in which the sets do differ."""
    return {
        name
        for name, param in sets.live.named_parameters()
        if not torch.equal(param, sets.second.get_parameter(name))
    }


@settings(deadline=None, max_examples=150)
@given(st.lists(UPDATES | st.just("rollback"), max_size=12), st.booleans())
def test_the_live_weights_are_always_those_that_were_committed(moves, is_reversible):
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = Sets(arena, is_reversible=is_reversible)
        served, before = version(0), None
        known: list[bool] = [False, False]
        for seed, move in enumerate(moves, 1):
            if move == "rollback":
                if before is not None:
                    sets.stager.flip("before")
                    served, before = before, served
                    known.reverse()
            else:
                patterns, outcome, where, in_place = move
                sent = of(version(seed), patterns) if patterns else version(seed)
                staged = served | sent
                before = None
                if stage(sets, sent, patterns, outcome, where, in_place):
                    assert shows(sets.second, staged)
                    content = sets.stager.versions.staged.content
                    assert (content is not None) == (known[0] or not patterns)
                    if content is not None:
                        assert content.digest() == digest(staged)
                    assert shows(sets.live, served), "what is served was touched"
                    if outcome == "commit":
                        known = [content is not None, known[0]]
                        sets.stager.flip()
                        before = served if is_reversible else None
                        served = staged
                        assert sets.shadow.stale == (
                            {PARAMS[p] for p in patterns or GROUPS}
                            if is_reversible
                            else set()
                        )
            assert shows(sets.live, served)
            if is_reversible and sets.arena.stats()["settled"]:
                assert differing(sets) <= sets.shadow.stale


def stage(sets, sent, patterns, outcome, where, in_place) -> bool:
    """Whether it was staged; else it broke, as it was to."""
    num_good = where if outcome == "break" else None
    weights = InPlace(sent, num_good)
    if not in_place:
        weights.into = None
    if outcome == "cancel":

        def between(num_bytes: int) -> None:
            raise Cancelled("the update was aborted")

        sets.between = between
    with suppress(ConnectionError, Cancelled):
        sets.stage(weights, patterns)
        return True
    sets.between = Sets.between
    return False


def test_drift_and_digest_are_of_the_whole_version(sets):
    sets.stage(version(1).items())
    sets.stager.flip()
    told = []
    sets.stager.staged, staged = told.append, sets.stager.staged
    norm = {"norm": version(2)["norm"]}
    sets.stage(norm.items(), ["norm"])
    (content,) = told
    assert content.digest() == digest(version(1) | norm)
    expected = how_far(version(1), version(1) | norm)
    assert staged(content)["overall"] == expected > 0


def test_a_subset_on_unknown_weights_leaves_the_whole_unknown(sets):
    assert sets.stage([("norm", version(1)["norm"])], ["norm"]) == 0
    versions = sets.stager.versions
    assert versions.served.content is versions.staged.content is None


def test_only_parameters_behind_the_live_version_are_copied(sets):
    sets.stage(version(1).items())
    sets.stager.flip()
    assert sets.stage([("norm", version(2)["norm"])], ["norm"]) == 2
    sets.stager.flip()
    assert sets.stage([("embed.weight", version(3)["embed.weight"])], ["embed*"]) == 1
    sets.stager.flip()
    assert sets.stage([("embed.weight", version(4)["embed.weight"])], ["embed*"]) == 0


def test_a_tensor_that_no_pattern_declares_is_not_received_in_place(sets):
    for seed in (1, 2):
        sets.stage(version(seed).items())
        sets.stager.flip()
    weights = InPlace(version(3))
    with pytest.raises(WeightsMismatch, match="no pattern"):
        sets.stage(weights, ["norm"])
    assert weights.placed == {"norm"}


def test_a_parameter_left_half_written_by_a_failed_subset_is_restored_by_the_next(sets):
    q = {"attention.q": version(1)["attention.q"]}
    with pytest.raises(WeightsMismatch, match="missing"):
        sets.stage(q.items(), ["attention.*"])
    assert sets.shadow.stale == {"attention.qkv"}
    sets.stage([("norm", version(1)["norm"])], ["norm"])
    sets.stager.flip()
    assert shows(sets.live, version(0) | {"norm": version(1)["norm"]})


def test_a_subset_replaces_tensors_that_a_failed_update_received_in_place(sets):
    for seed in (1, 2):
        sets.stage(version(seed).items())
        sets.stager.flip()
    with pytest.raises(ConnectionError):
        sets.stage(InPlace(version(3), num_good=0))
    sets.stage([("norm", version(4)["norm"])], ["norm"])
    sets.stager.flip()
    assert shows(sets.live, version(2) | {"norm": version(4)["norm"]})


def test_layers_that_adapters_wrap_are_carried_like_others():
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = Sets(arena, wrapped=True)
        sets.stage(version(1).items())
        sets.stager.flip()
        norm = {"norm": version(2)["norm"]}
        assert sets.stage(norm.items(), ["norm"]) == 2
        sets.stager.flip()
        assert shows(sets.live, version(1) | norm)


def test_an_undone_flip_leaves_what_frameworks_have_sent_as_it_was(sets):
    """Else an incomplete version of theirs would count as usual."""
    stager, told = sets.stager, []
    for seed, param in enumerate(("norm", "embed.weight"), 1):
        sets.stage(version(seed).items())
        staged = replace(stager.versions.staged, sent=("verl", frozenset({param})))
        stager.versions = stager.versions._replace(staged=staged)
        stager.flip()
        told.append(dict(stager.sent_by))
    stager.flip("undo")
    assert stager.sent_by == told[0] == {"verl": frozenset({"norm"})} != told[1]
