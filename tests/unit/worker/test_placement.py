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


TOTAL = 80 << 30
KIB = 1 << 10


@pytest.fixture
def arena(monkeypatch):
    """An arena on the host, for a model of one parameter of 20,000 bytes."""
    with open_arena(torch.device("cpu")) as arena:
        monkeypatch.setattr(placement.Arena, "open", lambda device: arena)
        monkeypatch.setattr(placement.support, "support_obstacle", lambda *_: None)
        monkeypatch.setattr(placement, "one_set_obstacle", lambda *_: None)
        yield arena


def placed(
    arena,
    monkeypatch,
    *,
    free=TOTAL,
    total=TOTAL,
    asked=None,
    staging="auto",
    limits=None,
):
    """Where a model lies on a GPU with so much memory."""

    def load():
        model = torch.nn.Module()
        model.register_parameter("a", torch.nn.Parameter(arena.empty((5000,))))
        limit(arena, **(limits or {}))
        return model

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
    cache = SimpleNamespace(kv_cache_memory_bytes=asked, gpu_memory_utilization=0.5)
    made = config(staging)
    made.cache_config = cache
    return placement.placement_of(placement.load_into_arena(load, made))


def test_two_sets_that_leave_room_for_a_cache_are_two_sets(arena, monkeypatch):
    assert placed(arena, monkeypatch, asked=1 << 20) == placement.Placement(arena, None)
    assert arena.phase == "paired"


def test_two_sets_that_leave_no_room_for_a_cache_are_one(arena, monkeypatch):
    found = placed(arena, monkeypatch, total=80 * KIB)  # half of it is the engine's
    assert found.is_short and arena.phase == "consolidated"
    assert "leave 0.00 GiB for the KV cache" in found.reason


def test_two_sets_beside_which_a_cache_of_the_asked_size_does_not_fit_are_one(
    arena, monkeypatch
):
    assert placed(arena, monkeypatch, free=1 << 20, asked=1 << 21).is_short
    assert arena.phase == "consolidated"


@pytest.mark.parametrize("staging", ["auto", "device"])
def test_two_sets_stay_where_one_is_not_possible_or_not_wanted(
    arena, monkeypatch, staging
):
    if staging == "auto":
        monkeypatch.setattr(placement, "one_set_obstacle", lambda *_: "it has experts")
    found = placed(arena, monkeypatch, total=80 * KIB, staging=staging)
    assert found == placement.Placement(arena, None) and arena.phase == "paired"


def test_a_second_set_that_finds_no_memory_is_short_of_it(arena, monkeypatch):
    found = placed(arena, monkeypatch, limits={"budget": 0})
    assert found.is_short and "lacks" in found.reason
