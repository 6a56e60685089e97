"""The door of an adopted call, where kernels know the places of parameters."""

from collections.abc import Callable

import pytest
import torch

from vllm.inflight.errors import Conflict
from vllm.inflight.worker.staging.extension import Door

CPU = torch.device("cpu")


def replace_data(layer: torch.nn.Module) -> None:
    layer.weight.data = torch.ones(2, 2)


def replace_parameter(layer: torch.nn.Module) -> None:
    layer.weight = torch.nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("replace", [replace_data, replace_parameter])
def test_a_parameter_that_a_method_replaces_is_put_back_and_the_call_has_failed(
    replace: Callable[[torch.nn.Module], None],
) -> None:
    """Graphs would go on with the memory that they know."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    param, place = model[0].weight, model[0].weight.data_ptr()
    door = Door(lambda _: None, model, torch.nn.Module(), clones=False, device=CPU)
    door.bring_home()
    assert door.failure is None
    replace(model[0])
    door.bring_home()
    assert model[0].weight is param and param.data_ptr() == place
    assert isinstance(door.failure, Conflict)
    assert "0.weight of the shadow model" in door.failure.message


def test_layers_that_are_made_anew_during_a_load_may_have_other_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    door = Door(lambda _: None, model, torch.nn.Module(), clones=True, device=CPU)
    replace_parameter(model[0])
    door.bring_home()
    assert door.failure is None
