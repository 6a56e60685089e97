"""Names that a model does not have: its loader may know them, and is asked.

Intake and plan as on a GPU, on memory of the host.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.second_set import Model, Sets, shows, version
from vllm.inflight.errors import WeightsMismatch
from vllm.inflight.stage import intake
from vllm.inflight.stage.arena import Arena

STRANGE = "a bias by another name"


class Renaming(Model):
    """Its checkpoints call the norm otherwise, as the loader alone knows."""

    is_broken = False

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == STRANGE:
                super().load_weights([("norm", tensor)])
                if self.is_broken:
                    raise ValueError("in the middle of it")
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


def test_what_the_loader_knows_by_another_name_is_taken_and_replayed(sets):
    sets.stage(renamed(1).items())
    sets.stager.flip()
    assert shows(sets.live, version(1))
    sets.second.__class__ = Renaming
    before = sets.second.num_loads
    sets.stage(renamed(2).items())
    assert sets.second.num_loads == before, "the plan knew all of it"
    sets.stager.flip()
    assert shows(sets.live, version(2))


def test_all_that_it_does_not_know_is_told_and_what_comes_after_is_looked_at(sets):
    many = {f"no such {n}": torch.ones(2) for n in range(50)}
    bad = {"attention.q": torch.full_like(version(1)["attention.q"], torch.nan)}
    with pytest.raises(WeightsMismatch, match="NaN or Inf") as refusal:
        sets.stage((renamed(1) | many | bad).items())
    assert {*many, "attention.q"} <= set(refusal.value.tensors)
    assert STRANGE not in refusal.value.tensors
    assert sets.second.num_loads <= intake.MOST_ASKED + len(version(1))


def test_what_it_failed_on_is_never_replayed(sets):
    sets.second.is_broken = True
    for _ in range(2):
        with pytest.raises(WeightsMismatch, match="unknown") as refusal:
            sets.stage(renamed(1).items())
        assert refusal.value.tensors[0] == STRANGE
    sets.second.is_broken = False
    sets.stage(renamed(1).items())
    sets.stager.flip()
    assert shows(sets.live, version(1))
