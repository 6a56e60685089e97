"""Names that a model does not have: its loader may know them, and is asked.

Intake and plan as on a GPU, on memory of the host.
"""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.support.shadow_on_host import SHARDS, Model, Sets, shows, version
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.ops import Digest
from vllm.inflight.update import Manifest
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.staging import loader
from vllm.inflight.worker.verify.checks import MOST_ASKED, TensorChecks
from vllm.inflight.worker.verify.ignored_tensors import IgnoredTensors
from vllm.inflight.worker.verify.start_checkpoint import StartCheckpoint

STRANGE = "a bias by another name"
FUSED = "attention.qkv"


class Renaming(Model):
    """Its checkpoints call the norm otherwise, as the loader alone knows."""

    is_broken: type[Exception] | None = None

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name in (STRANGE, "another"):
                super().load_weights([("norm", tensor)])
                if self.is_broken:
                    raise self.is_broken("in the middle of it")
            elif name == FUSED:
                for shard, part in zip(SHARDS, tensor.chunk(3), strict=True):
                    super().load_weights([(f"attention.{shard}", part)])
            elif name.startswith("no such"):
                self.num_loads += 1
                raise KeyError(name)
            else:
                super().load_weights([(name, tensor)])


@pytest.fixture
def sets() -> Iterator[Sets]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        sets = Sets(arena)
        sets.second.__class__ = Renaming
        yield sets


def renamed(seed: int) -> dict[str, torch.Tensor]:
    named = version(seed)
    return {STRANGE: named.pop("norm"), **named}


def test_a_name_that_only_the_loader_knows_is_accepted_and_replayed(sets):
    for seed in (1, 2):
        sets.stage(renamed(seed).items())
        sets.stager.flip()
        assert shows(sets.live, version(seed))
        sets.second.__class__ = Renaming
    before = sets.second.num_loads
    sets.stage(renamed(3).items())
    assert sets.second.num_loads == before, "the plan knew all of it"
    sets.stager.flip()
    assert shows(sets.live, version(3))


def test_all_unknown_names_are_reported_and_later_tensors_are_still_checked(sets):
    many = {f"no such {n}": torch.ones(2) for n in range(50)}
    bad = {"attention.q": torch.full_like(version(1)["attention.q"], torch.nan)}
    with pytest.raises(WeightsMismatch, match="NaN or Inf") as rejection:
        sets.stage((renamed(1) | many | bad).items())
    assert {*many, "attention.q"} <= set(rejection.value.tensors)
    assert STRANGE not in rejection.value.tensors
    assert rejection.value.num_tensors == len(many) + len(bad)
    assert rejection.value.causes == {"unknown": len(many), "not_finite": 1}
    assert sets.second.num_loads <= MOST_ASKED + len(version(1))
    assert f"was asked about {MOST_ASKED} of these names" in str(rejection.value)


def test_tensors_whose_loader_failed_are_never_replayed(sets):
    sets.second.is_broken = ValueError
    for _ in range(2):
        with pytest.raises(WeightsMismatch, match="unknown") as rejection:
            sets.stage(renamed(1).items())
        assert rejection.value.tensors[0] == STRANGE
    sets.second.is_broken = RuntimeError
    with pytest.raises(WeightsMismatch, match=f"{STRANGE}: the model's loader"):
        sets.stage(renamed(1).items())
    sets.second.is_broken = None
    sets.stage(renamed(1).items())
    sets.stager.flip()
    assert shows(sets.live, version(1))


@pytest.mark.parametrize("replayed", [(), ("norm",), (STRANGE,), ("norm", STRANGE)])
@pytest.mark.parametrize("other", ["norm", "another"])
def test_one_parameter_sent_under_two_names_is_rejected(sets, replayed, other):
    for name in replayed:
        sets.stage(renamed(1).items() if name == STRANGE else version(1).items())
    norm = version(2)["norm"]
    for order in ((STRANGE, other), (other, STRANGE)):
        named = version(2)
        del named["norm"]
        with pytest.raises(WeightsMismatch, match="by tensors of two names"):
            sets.stage([*named.items(), *((name, norm) for name in order)])


@pytest.mark.parametrize("asks_loader", [True, False])
def test_a_fused_parameter_comes_whole_or_in_parts_and_not_both(sets, asks_loader):
    sets.shadow.asks_loader = asks_loader  # as where a loader maps names
    named = version(1)
    parts = [f"attention.{shard}" for shard in SHARDS]
    whole = {FUSED: torch.cat([named[part] for part in parts])}
    others = {name: named[name] for name in named.keys() - set(parts)}
    for _ in range(3):  # recorded, proved, replayed
        sets.stage((others | whole).items())
        for part in (parts[0], parts[-1]):
            other = {part: version(2)[part]}
            for order in (whole | other, other | whole):
                with pytest.raises(WeightsMismatch, match=f"{FUSED}: .* two names"):
                    sets.stage((others | order).items())
    sets.stage((others | whole).items())
    sets.stager.flip()
    assert shows(sets.live, named)


@pytest.mark.parametrize("num_before", [0, 1, 2])
@pytest.mark.parametrize("other", [STRANGE, "another", FUSED])
def test_an_integer_tensor_is_rejected_for_a_float_parameter_under_an_alternative_name(
    sets, other, num_before
):
    """Also where floats came by that name before, and were recorded."""
    named = version(1)
    if other == FUSED:
        named[other] = torch.cat([named.pop(f"attention.{part}") for part in SHARDS])
    else:
        named[other] = named.pop("norm")
    for _ in range(num_before):
        sets.stage(named.items())
    named[other] = named[other].to(torch.int32)
    why = "it is int32, the model's is float32"
    with pytest.raises(WeightsMismatch, match=f"{other}: .*{why}") as rejection:
        sets.stage(named.items())
    assert rejection.value.tensors == [other]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_tensors_on_the_host_are_checked_with_the_allowed_number_of_threads(
    sets, monkeypatch, num_threads
):
    seen = []
    for name in ("digest", "count_nonfinite"):
        real = getattr(loader.ops, name)

        def looked(tensors, *, num_threads=1, real=real, **how):
            seen.append(num_threads)
            return real(tensors, num_threads=num_threads, **how)

        monkeypatch.setattr(loader.ops, name, looked)
    sets.shadow.num_threads = num_threads
    sets.stage(version(1).items())
    assert seen == [num_threads] * 2 * len(version(1))


def test_a_tensor_is_checked_for_being_spare_only_if_it_does_not_fit(monkeypatch):
    """To map one takes microseconds, and there are thousands."""
    asked = []
    monkeypatch.setattr(TensorChecks, "is_spare", lambda _, name: asked.append(name))
    known = {name: (None, "float32") for name in ("one", "two")}
    origin = StartCheckpoint({"one": (2,), "two": (2,)})
    inspection = TensorChecks(
        Manifest(),
        known,
        IgnoredTensors(),
        origin,
        asks_loader=False,
        allow_nonfinite=False,
    )
    assert inspection.accepts("one", torch.ones(2, 1))
    assert not inspection.accepts("two", torch.ones(1, 2))
    assert asked == ["two"]


def test_an_announced_tensor_that_may_still_arrive_is_not_reported_missing(sets):
    announced = [
        {"name": name, "shape": list(tensor.shape), "dtype": "float32"}
        for name, tensor in version(1).items()
    ]
    inspection = TensorChecks(
        Manifest.parse({"format": 1, "tensors": announced}),
        sets.shadow.known_names,
        IgnoredTensors(),
        StartCheckpoint({}),
        asks_loader=False,
        allow_nonfinite=False,
    )
    wrong = torch.ones(3)
    assert not inspection.accepts("norm", wrong)
    for is_end, named in ((False, {"norm"}), (True, version(1).keys())):
        places = sets.shadow.places
        rejection = inspection.rejection([], places, places.params_of, is_end=is_end)
        assert set(rejection.tensors) == named


def test_a_subset_of_only_ignored_tensors_is_rejected(sets):
    sets.shadow.ignored = IgnoredTensors(endings=("head.weight",))
    with pytest.raises(WeightsMismatch, match="nothing was sent of the subset"):
        sets.stage([("head.weight", torch.ones(2))], ("head.*",))


def test_garbage_collection_does_not_track_the_facts_kept_of_a_tensor():
    named = version(1)
    inspection = TensorChecks(
        Manifest(),
        {},
        IgnoredTensors(),
        StartCheckpoint({}),
        asks_loader=True,
        allow_nonfinite=False,
    )
    for name, tensor in named.items():
        assert inspection.accepts(name, tensor)
        assert inspection.judge(name, Digest(1, 2), 0)
    kept = inspection.facts()
    for _ in range(3):  # one for each of the tuples in a tuple
        gc.collect()
    assert set(kept) == set(named)
    assert not any(gc.is_tracked(facts) for facts in kept.values())
