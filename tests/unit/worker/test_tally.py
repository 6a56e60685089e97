"""The tally of an update: how much of the model has come, at the cost of what comes."""

import torch

from vllm.inflight.update import DRAFT, Manifest
from vllm.inflight.worker.replay_plan import Entry
from vllm.inflight.worker.staging.coverage import Coverage

NAMES = ("gate_up", "norm", "empty", f"{DRAFT}norm")
HALF, OTHER_HALF = (0, (2,), (1,)), (2, (2,), (1,))
ALL, NOTHING = (0, (4,), (1,)), (0, (0,), (1,))


class NotCounted(dict):
    """Views of a parameter whose elements nobody may count."""

    def values(self):
        raise AssertionError("a complete parameter was counted again")


def coverage() -> Coverage:
    """Of four parameters of four elements, but one has none; one is the drafter's."""
    shapes = {name: torch.Size([0 if name == "empty" else 4]) for name in NAMES}
    return Coverage(torch.nn.Module(), shapes, set())


def write(counted: Coverage, name: str, view: tuple) -> None:
    """Replay a load of this view of a parameter."""
    shape = torch.Size(view[1])
    counted.replayed(Entry(shape, torch.float32, filled=[(name, view)]))


def tallied(
    counted: Coverage, manifest: Manifest | None = None
) -> tuple[int, int, int]:
    """Parameters that the update has to fill, that are begun, and that are complete."""
    found = counted.tally(manifest)
    return found["total"], found["begun"], found["complete"]


def test_a_parameter_without_elements_is_complete_from_the_start() -> None:
    assert tallied(coverage()) == (4, 0, 1)


def test_a_parameter_is_begun_with_one_element_and_complete_with_all() -> None:
    counted = coverage()
    write(counted, "gate_up", NOTHING)
    assert tallied(counted) == (4, 0, 1)
    write(counted, "gate_up", HALF)
    assert tallied(counted) == (4, 1, 1)
    write(counted, "gate_up", OTHER_HALF)
    write(counted, "norm", HALF)
    assert tallied(counted) == (4, 2, 2)


def test_the_drafter_counts_where_the_update_brings_a_tensor_of_it() -> None:
    counted = coverage()
    write(counted, "norm", ALL)
    assert tallied(counted, Manifest()) == (3, 1, 2)
    assert tallied(counted, Manifest(draft=True)) == (1, 0, 0)
    write(counted, f"{DRAFT}norm", ALL)
    assert tallied(counted, Manifest()) == (4, 2, 3)
    assert tallied(counted, Manifest(subset=("*",))) == (2, 2, 2)


def test_what_is_complete_is_not_counted_again() -> None:
    """A trainer may make a call for each tensor, and each call has a tally."""
    counted = coverage()
    write(counted, "norm", ALL)
    before = tallied(counted)
    counted.fills["norm"].views = NotCounted()
    assert tallied(counted) == before
