"""Our state on an object of upstream is found by class, and ends with the object."""

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from vllm.inflight.attached import ATTRIBUTE, Attached, AttachedOnDemand
from vllm.inflight.errors import UpstreamChanged


@dataclass(slots=True)
class Counted(AttachedOnDemand):
    """A state that is empty at first."""

    count: int = 0


class Made(Attached):
    """A state that somebody has to make."""

    def __init__(self, owner: object) -> None:
        self.owner = owner


class Theirs:
    """A class of upstream; what it has no attribute for, another object has."""

    def __getattr__(self, name: str) -> object:
        return SimpleNamespace(vllm_inflight=Counted(9)).__getattribute__(name)


def test_a_state_is_made_when_it_is_first_asked_for():
    owner = SimpleNamespace()
    assert Counted.find(owner) is None
    assert vars(owner) == {}, "asking leaves no trace"
    Counted.of(owner).count += 1
    assert Counted.find(owner) is Counted.of(owner)
    assert Counted.of(owner).count == 1
    assert vars(owner).keys() == {ATTRIBUTE}


def test_a_missing_state_is_reported_by_name():
    owner = SimpleNamespace()
    assert Made.find(owner) is None
    with pytest.raises(UpstreamChanged, match=r"SimpleNamespace .*no Made"):
        Made.of(owner)
    made = Made(owner).attach(owner)
    assert Made.of(owner) is made
    assert Made(owner).attach(owner) is Made.of(owner) is not made


@pytest.mark.parametrize("value", [3, "theirs", Made(None)])
def test_a_foreign_value_in_our_attribute_is_reported_and_not_replaced(value):
    owner = SimpleNamespace(**{ATTRIBUTE: value})
    for ask in (Counted.find, Counted.of):
        with pytest.raises(UpstreamChanged, match=r"SimpleNamespace\.vllm_inflight"):
            ask(owner)
    if not isinstance(value, Attached):
        with pytest.raises(UpstreamChanged, match="that vllm-inflight did not put"):
            Counted().attach(owner)
    assert vars(owner) == {ATTRIBUTE: value}


def test_the_state_of_another_object_is_not_taken_for_that_of_its_wrapper():
    wrapper = Theirs()
    assert wrapper.vllm_inflight.count == 9
    assert Counted.find(wrapper) is None
    assert Counted.of(wrapper).count == 0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))]
)
def test_a_copy_has_a_state_of_its_own(copied):
    owner = SimpleNamespace()
    Counted.of(owner).count = 1
    Counted.of(copied(owner)).count += 1
    assert Counted.of(owner).count == 1


def test_a_state_that_refers_to_its_object_is_freed_with_it():
    class Owner:
        pass

    owner = Owner()
    Made(owner).attach(owner)
    part = weakref.ref(owner)
    del owner
    gc.collect()
    assert part() is None
