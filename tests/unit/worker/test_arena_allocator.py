"""How torch's allocator uses an arena, on host memory."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from tests.unit.worker.test_arena import (
    PAGE,
    filled,
    is_mapped,
    limit,
    num_files,
    opened,
    paired,
    twins,
)
from vllm.inflight import errors
from vllm.inflight.worker.memory import arena as native


@pytest.fixture
def arena():
    with opened() as arena:
        yield arena


def callbacks(arena):
    """The functions that torch gets: malloc(bytes) and free(address)."""
    library = ctypes.CDLL(arena._core.__file__)
    malloc, free = library.inflight_arena_malloc, library.inflight_arena_free
    malloc.restype, free.restype = ctypes.c_void_p, None
    rest = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    malloc.argtypes, free.argtypes = rest, [ctypes.c_void_p, *rest]
    device = arena.stats()["device"]
    return lambda size: malloc(size, device, None), lambda p: free(p, 0, device, None)


def test_the_second_of_two_arenas_is_filled_and_each_frees_its_own_memory(arena):
    malloc, free = callbacks(arena)
    first = malloc(PAGE)
    arena.consolidate()
    core = arena._core
    drafters = core.arena_open(arena.stats()["device"], 1 << 20)
    core.arena_fill(drafters)
    second = malloc(PAGE)
    assert core.arena_contains(drafters, second, PAGE)
    assert not core.arena_contains(arena._handle, second, PAGE)
    free(second), free(first)
    assert core.arena_stats(drafters)["num_segments"] == 0
    assert arena.stats()["num_segments"] == 0
    core.arena_close(drafters)
    assert arena.stats()["phase"] == "consolidated"


def test_torch_gets_arena_memory_only_while_the_arena_is_loading(arena):
    malloc, free = callbacks(arena)
    with ThreadPoolExecutor(4) as threads:
        pointers = list(threads.map(malloc, [PAGE + 1] * 100))
        threads.map(free, [*pointers[::2], 12345])
    assert arena.stats()["live_bytes"] == 100 * PAGE
    limit(arena, budget=101 * PAGE)
    assert malloc(2 * PAGE) is None
    assert "create failed" in arena.stats()["last_error"]
    limit(arena)
    arena.consolidate()
    assert malloc(PAGE) is None
    assert "must be loading" in arena.stats()["last_error"]
    list(map(free, pointers))


def test_idle_memory_of_torch_is_dropped_and_a_failure_is_reported(arena, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    malloc, _ = callbacks(arena)
    sizes = {malloc(PAGE): PAGE, malloc(PAGE): 0, 8: 0}
    segments = [{"address": at, "allocated_size": n} for at, n in sizes.items()]
    pool = SimpleNamespace(snapshot=lambda: segments)
    limit(arena, call="unmap", times=1)
    with pytest.raises(errors.ArenaFault, match="cpu: unmap failed"):
        arena._drop_idle(pool)
    assert arena.stats()["num_handles"] == 2
    segments[1]["address"] = malloc(PAGE)
    arena._drop_idle(pool)
    assert (arena.stats()["num_segments"], arena.stats()["num_handles"]) == (1, 2)


def test_nested_loading_is_rejected(arena):
    with arena.loading(), pytest.raises(RuntimeError, match="nest"):
        arena.loading().__enter__()


def test_expandable_segments_of_torch_are_rejected():
    native.refuse_expandable_segments({"expandable_segments": False})
    with pytest.raises(errors.ConfigError, match="out of PYTORCH_CUDA_ALLOC_CONF"):
        native.refuse_expandable_segments({"expandable_segments": True})


def test_a_closed_arena_leaves_neither_files_nor_addresses():
    arena = opened()
    tensors = paired(arena)
    places = [t.data_ptr() for t in tensors + twins(arena, tensors)]
    assert num_files() == 4 and all(map(is_mapped, places))
    del tensors
    malloc, free = callbacks(arena)
    arena.close()
    arena.close()
    assert num_files() == 0 and not any(map(is_mapped, places))
    assert malloc(PAGE) is free(places[0]) is None


def test_addresses_that_torch_may_still_free_are_not_given_out_again():
    with opened() as arena:
        tensor = filled(arena, 1)
    assert is_mapped(tensor.data_ptr()) and num_files() == 0
