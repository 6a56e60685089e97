"""Where weights lie when no arena can be opened."""

from types import SimpleNamespace

import pytest
import torch

from tests.unit.worker.test_arena import limit, num_files
from vllm.inflight.errors import ArenaTorn, ConfigError
from vllm.inflight.patch.worker import _shutdown
from vllm.inflight.worker.memory import placement
from vllm.inflight.worker.memory.arena import Arena, refuse_expandable_segments
from vllm.inflight.worker.model_state import ModelState
from vllm.inflight.worker.worker_state import WorkerState

open_arena = Arena.open


@pytest.fixture(autouse=True)
def no_arena(monkeypatch):
    """A GPU whose torch has expandable segments."""

    def opened(device):
        refuse_expandable_segments({"expandable_segments": True})

    monkeypatch.setattr(placement, "is_wanted", lambda vllm_config: True)
    monkeypatch.setattr(placement.Arena, "open", opened)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def config(staging):
    return SimpleNamespace(additional_config={"inflight": {"staging": staging}})


def test_staging_auto_loads_the_model_without_an_arena_and_keeps_the_reason():
    model = placement.load_into_arena(torch.nn.Identity, config("auto"))
    found = placement.placement_of(model)
    assert found.arena is None
    assert "take expandable_segments:True out of" in found.reason


def test_staging_on_the_device_is_rejected_with_the_reason():
    with pytest.raises(ConfigError, match=r"staging device cannot.*out of PYTORCH"):
        placement.load_into_arena(torch.nn.Identity, config("device"))


def test_an_arena_that_was_torn_at_the_start_gives_its_memory_back(monkeypatch):
    with open_arena(torch.device("cpu")) as arena:

        def load():
            model = torch.nn.Module()
            for name in ("a", "b"):
                model.register_parameter(name, torch.nn.Parameter(arena.empty((5000,))))
            limit(arena, call="map", skip=1, times=2)  # of what is consolidated
            return model

        monkeypatch.setattr(placement.Arena, "open", lambda device: arena)
        monkeypatch.setattr(placement.support, "support_obstacle", lambda *_: None)
        with pytest.raises(ArenaTorn):
            placement.load_into_arena(load, config("auto"))
        assert (arena.phase, num_files()) == ("closed", 0)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_worker_that_ends_keeps_the_arena_open_while_an_update_is_staged(is_busy):
    with open_arena(torch.device("cpu")) as arena:
        model = torch.nn.Identity()
        ModelState.of(model).set(placement.Placement(arena, None))
        stager = SimpleNamespace(
            is_busy=is_busy, close=lambda: None, shadow=SimpleNamespace(live=model)
        )
        worker = SimpleNamespace(
            device=torch.device("cuda"), vllm_inflight=WorkerState(stager=stager)
        )
        _shutdown(lambda self: None)(worker)
        assert arena.phase == ("loading" if is_busy else "closed")
