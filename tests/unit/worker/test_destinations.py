"""Where single elements of a tensor end up, for any view that a loader may copy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.inflight.worker.delta.destinations import Destinations, follow, nests
from vllm.inflight.worker.replay_plan import Copied, Entry, view_of


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_elements_are_followed_through_any_slice_and_any_turn(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tensor = torch.arange(torch.Size(sizes).numel()).view(sizes)
    part = tensor
    for dim in range(len(sizes)):
        first = data.draw(st.integers(0, part.shape[dim] - 1))
        end = data.draw(st.integers(first + 1, part.shape[dim]))
        step = data.draw(st.integers(1, 2))
        part = part[(slice(None),) * dim + (slice(first, end, step),)]
    part = part.permute(*data.draw(st.permutations(range(part.dim()))))
    memory = torch.full((part.numel() + 7,), -1)
    view = memory[3 : 3 + part.numel()].view(part.shape)
    view.copy_(part)
    assert nests(view_of(part))
    places = torch.arange(tensor.numel())
    offsets, inside = follow(places, view_of(part), view_of(view))
    assert inside.sum() == part.numel()
    assert torch.equal(memory[offsets[inside]], places[inside])


def test_a_part_that_repeats_elements_does_not_nest():
    assert not nests((0, (2, 3), (0, 1)))
    assert not nests((0, (4, 3), (2, 1)))
    assert nests((5, (4, 3), (1, 4)))


def test_a_view_that_the_log_cannot_count_is_no_place_for_deltas():
    tensor = torch.empty(0, dtype=torch.bfloat16)
    part = 0, (4, 4), (4, 1)
    for first, is_known in (((1 << 31) - 17, True), ((1 << 31) - 16, False)):
        copied = Copied("w", (first, (4, 4), (4, 1)), part, tensor, is_exact=True)
        entry = Entry(torch.Size((4, 4)), torch.bfloat16, [copied], is_proved=True)
        assert (Destinations.of(entry) is not None) is is_known


@pytest.mark.parametrize(
    ("order", "num_dims"),
    [((0, 1, 2, 3, 4), 1), ((1, 0, 2, 3, 4), 3), ((4, 3, 2, 1, 0), None)],
    ids=["as it is", "the outermost two turned", "all turned"],
)
def test_dimensions_in_one_piece_count_as_one_and_kernels_follow_four(
    order: tuple[int, ...], num_dims: int | None
) -> None:
    """A patch embedding of frames has five: outputs, colours, frames, rows, columns."""
    tensor = torch.empty(6, 3, 2, 5, 4, dtype=torch.bfloat16)
    part = tensor.permute(order)
    memory = torch.empty(part.shape, dtype=torch.bfloat16)
    copied = Copied("w", view_of(memory), view_of(part), memory, is_exact=True)
    entry = Entry(tensor.shape, tensor.dtype, [copied], is_proved=True)
    found = Destinations.of(entry)
    assert (found is None) == (num_dims is None)
    if found is not None:
        (steps,) = found.steps[:, 2:].reshape(1, -1, 3).tolist()
        assert sum(size > 1 for size, _, _ in steps) == num_dims
