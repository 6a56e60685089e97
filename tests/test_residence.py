"""Where weights live when there is no arena to be had."""

from types import SimpleNamespace

import pytest
import torch

from vllm.inflight.errors import ConfigError
from vllm.inflight.stage import residence
from vllm.inflight.stage.arena import refuse_expandable_segments


@pytest.fixture(autouse=True)
def no_arena(monkeypatch):
    """A GPU whose torch has expandable segments."""

    def opened(device):
        refuse_expandable_segments({"expandable_segments": True})

    monkeypatch.setattr(residence, "is_wanted", lambda vllm_config: True)
    monkeypatch.setattr(residence.Arena, "open", opened)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def config(staging):
    return SimpleNamespace(additional_config={"inflight": {"staging": staging}})


def test_auto_loads_the_model_all_the_same_and_knows_why():
    model = residence.settle_in(torch.nn.Identity, config("auto"))
    found = residence.residence_of(model)
    assert found.arena is None
    assert "take expandable_segments:True out of" in found.reason


def test_what_was_asked_for_by_name_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"staging device cannot.*out of PYTORCH"):
        residence.settle_in(torch.nn.Identity, config("device"))
