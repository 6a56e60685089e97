"""A plan is proved before it is trusted: replayed and loaded, and both compared."""

from collections.abc import Iterator

import pytest
import torch

from tests.second_set import HIDDEN, Batches, Model, Sets, shows, version
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.stage import proof
from vllm.inflight.stage.arena import Arena
from vllm.inflight.stage.plan import replay


@pytest.fixture
def sets() -> Iterator[Sets]:
    with Arena.open(torch.device("cpu"), 1 << 26) as arena:
        yield Sets(arena)


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """Errors that were logged."""
    found: list[str] = []
    monkeypatch.setattr(proof.logger, "error", lambda s, *a: found.append(s % a))
    return found


def test_what_was_recorded_wrongly_is_never_served(sets, told):
    sets.stage(version(1).items())
    sets.arena.flip()
    wrong = sets.shadow.plan.entry("attention.k", version(1)["attention.k"])
    ((target, (_, shape, stride)),) = wrong.copies
    wrong.copies = [(target, (0, shape, stride[::-1]))]
    for seed in (2, 3, 4):
        sets.stage(version(seed).items())
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert len(told) == 1
    assert "not what they do" in told[0] and "attention.k" in told[0]
    assert sets.second.num_loads == 2 * len(version(0)) + 2


def test_what_a_copy_gets_wrong_is_never_served(sets, monkeypatch, told):
    def replay_but_one(known):
        replay(known[:-1])

    monkeypatch.setattr(proof, "replay", replay_but_one)
    for seed in (1, 2, 3):
        sets.stage(Batches(version(seed)))
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert len(told) == 1 and "1 tensors (attention.v)" in told[0]
    assert sets.second.num_loads == 2 * len(version(0)) + 1


def test_a_tensor_is_proved_beside_others_of_its_parameter_that_are_not(sets, told):
    with pytest.raises(WeightsMismatch, match=r"attention\.qkv"):
        sets.stage(Batches({"attention.q": version(1)["attention.q"]}), ["attention.q"])
    for seed in (2, 3, 4):
        before = sets.second.num_loads
        sets.stage(Batches(version(seed)))
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert not told
    assert sets.second.num_loads == before, "all of it is replayed"


def test_a_loader_that_makes_tensors_of_its_own_is_never_replayed(sets):
    """Of a norm that no checkpoint has, when it has seen a key."""

    class Making(Model):
        def load_weights(self, weights):
            super().load_weights(self._with_norm(weights))

        @staticmethod
        def _with_norm(weights):
            keys = []
            for name, tensor in weights:
                keys += [name] * (name == "attention.k")
                yield name, tensor
            for _ in keys:
                yield "norm", torch.zeros(HIDDEN)

    sets.second.__class__ = Making
    for seed in (1, 2, 3, 4):
        named = version(seed)
        del named["norm"]
        sets.stage(Batches(named))
        sets.arena.flip()
        assert shows(sets.live, named | {"norm": torch.zeros(HIDDEN)})


def test_what_is_refused_once_is_not_recorded_again(sets):
    sets.stage(version(1).items())
    sets.arena.flip()
    sets.shadow.plan.refuse(["norm"])
    for seed in (2, 3, 4):
        before = sets.second.num_loads
        sets.stage(version(seed).items())
        sets.arena.flip()
        assert shows(sets.live, version(seed))
    assert sets.second.num_loads == before + 1


def test_what_is_like_the_version_before_is_proved_as_well(sets, monkeypatch, told):
    """A replay that copies nothing leaves what was there, which may be equal."""
    sets.stage(version(1).items())
    sets.arena.flip()
    monkeypatch.setattr(proof, "replay", lambda known: None)
    sets.stage(Batches(version(0)))  # as the second set has it
    assert len(told) == 1 and f"{len(version(0))} tensors" in told[0]


def test_what_was_tried_and_not_loaded_is_carried_by_a_subset(sets, monkeypatch):
    for _ in range(2):
        sets.stage(version(1).items())
        sets.stager.flip()
        sets.shadow.plan.entry("norm", version(1)["norm"]).is_proved = False
    sets.shadow.behind.clear()  # both sets are version 1

    def fail(self, weights):
        next(iter(weights))
        raise MemoryError

    with (
        monkeypatch.context() as patched,
        pytest.raises(WeightsMismatch, match="norm"),
    ):
        patched.setattr(Model, "load_weights", fail)
        only = {"norm": version(2)["norm"]}
        sets.stage(Batches(only), subset=["norm"])
    embed = version(3)["embed.weight"]
    sets.stage([("embed.weight", embed)], subset=["embed.weight"])
    sets.stager.flip()
    assert shows(sets.live, version(1) | {"embed.weight": embed})


def test_an_update_that_fails_proves_nothing(sets):
    sets.stage(version(1).items())
    sets.arena.flip()
    with pytest.raises(ConnectionError):
        sets.stage(_broken(version(2)))
    entries = [sets.shadow.plan.entry(n, t) for n, t in version(1).items()]
    assert not any(entry.is_proved for entry in entries)
    sets.stage(version(3).items())
    sets.arena.flip()
    assert shows(sets.live, version(3))
    assert all(entry.is_proved for entry in entries)


def _broken(named):
    yield from list(named.items())[:3]
    raise ConnectionError("the wire broke")
