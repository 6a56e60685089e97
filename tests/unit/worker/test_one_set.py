"""What delta staging does not support is named before anything is loaded."""

from types import SimpleNamespace
from typing import Any

import torch

from vllm.inflight.worker.model import support
from vllm.inflight.worker.model.kinds.hidden_weights import PACKED
from vllm.inflight.worker.model.one_set import one_set_obstacle


def config() -> Any:
    """A plain engine's."""
    of_model = {"enable_sleep_mode": False, "runner_type": "generate"}
    return SimpleNamespace(
        model_config=SimpleNamespace(**of_model),
        additional_config={"inflight": {"staging": "delta"}},
    )


def test_a_plain_model_has_none():
    assert one_set_obstacle(torch.nn.Linear(2, 2), config()) is None


def trees() -> tuple[torch.nn.Module, torch.nn.Module]:
    live = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with torch.device("meta"):
        return live, torch.nn.Sequential(torch.nn.Linear(4, 3))


def test_layouts_that_loaders_write_are_equal():
    assert support.layouts_differ(*trees()) is None


def test_a_packed_layer_is_named():
    live, hollow = trees()
    packed = torch.zeros(1)
    vars(live[0])[PACKED] = lambda x, weight, bias: packed
    reason = support.layouts_differ(live, hollow)
    assert reason == "layer 0 is packed for the GEMM of the CPU build"
    vars(live[0])[PACKED] = lambda x, weight, bias: x
    assert support.layouts_differ(live, hollow) is None


def test_a_parameter_with_more_places_than_32_bits_can_tell_is_named(monkeypatch):
    assert support.MOST_ELEMENTS == 2**31
    monkeypatch.setattr(support, "MOST_ELEMENTS", 12)
    reason = support.layouts_differ(*trees())
    assert reason == "0.weight has 12 elements, too many for a log"


def test_a_parameter_that_is_served_in_another_form_is_named():
    live, hollow = trees()
    live[0].weight.data = live[0].weight.data.t().contiguous().t()
    reason = support.layouts_differ(live, hollow)
    assert reason == "the layout of 0.weight changes after loading"
    live, hollow = trees()
    live[0].register_parameter("bias", None)
    reason = support.layouts_differ(live, hollow)
    assert reason == "the layout of 0.bias changes after loading"
