"""What is announced can be believed, or is refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.support.transports.peers import tensors
from vllm.inflight.transport.buckets.tensor_list import TensorList


def test_a_tensor_list_round_trips_through_upstreams_fields():
    announced = TensorList.of(tensors().items())
    assert TensorList.parse(**announced.update_info) == announced


def test_an_empty_tensor_list_can_be_announced():
    assert TensorList.of([]).sizes == []


@pytest.mark.parametrize(
    ("info", "named"),
    [
        ((["a"], [], [[1]]), "'dtype_names' has 0 entries"),
        ((["a"], ["float32"], []), "'shapes' has 0 entries"),
        (("a", ["float32"], [[1]]), "'names' must be a list"),
        ((["a"], ["float33"], [[1]]), "no dtype 'float33'"),
        ((["a"], ["nn"], [[1]]), "no dtype 'nn'"),
        ((["a"], ["float32"], [[-1]]), "'a' cannot have the shape"),
        ((["a"], ["float32"], [[1.5]]), "'a' cannot have the shape"),
        ((["a"], ["float32"], [3]), "'a' cannot have the shape"),
        ((["a"], ["float32"], [[0, 1 << 63]]), "'a' cannot have the shape"),
        (([7], ["float32"], [[1]]), "7 in 'names'"),
    ],
)
def test_an_invalid_tensor_list_is_rejected_by_name(info, named):
    with pytest.raises(ValueError, match=named):
        TensorList.parse(*info)


@pytest.mark.parametrize(
    ("sent", "num_good", "named"),
    [
        ([("a", torch.ones(2))], 1, "'b' and all later"),
        ([("a", torch.ones(2)), ("c", torch.ones(3))], 1, "the source yields .'c'"),
        ([("a", torch.ones(3)), ("b", torch.ones(3))], 0, "the tensor list has .'a'"),
        (
            [("a", torch.ones(2).half()), ("b", torch.ones(3))],
            0,
            "the tensor list has .'a'",
        ),
        (
            [("a", torch.ones(2)), ("b", torch.ones(3)), ("c", torch.ones(1))],
            2,
            "'c' is not in the tensor list",
        ),
    ],
)
def test_tensors_that_differ_from_the_tensor_list_are_rejected(sent, num_good, named):
    """The tensors before the first that differs are yielded, and no other."""
    announced = TensorList.of([("a", torch.zeros(2)), ("b", torch.zeros(3))])
    yielded = []
    with pytest.raises(ValueError, match=named):
        for index, content in announced.checked(sent):
            yielded.append((index, content.view(torch.float32).tolist()))
    good = [tensor.tolist() for _, tensor in sent[:num_good]]
    assert yielded == list(enumerate(good))
