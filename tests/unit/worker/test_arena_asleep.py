"""An arena that gives its memory back and gets it again, on host memory."""

import pytest
import torch

from tests.unit.worker.test_arena import (
    PAGE,
    copies,
    equal,
    filled,
    is_mapped,
    limit,
    loaded,
    num_files,
    opened,
    paired,
    stage,
    twins,
)
from vllm.inflight.worker.memory import arena as native
from vllm.inflight.worker.memory.host_copy import HostCopy, beside, everything


@pytest.fixture
def arena():
    with opened() as arena:
        yield arena


def asleep(arena, tensors, places=everything):
    """A suspended arena, and what has been kept of it."""
    backup = HostCopy(arena, places(arena))
    arena.unpair()
    arena.suspend()
    return backup


def test_a_suspended_arena_has_addresses_and_no_memory(arena):
    tensors = paired(arena)
    before, places = copies(tensors), [t.data_ptr() for t in tensors]
    second = [twin.data_ptr() for twin in twins(arena, tensors)]
    backup = asleep(arena, tensors)
    stats = arena.stats()
    assert (stats["phase"], stats["backed_bytes"], num_files()) == ("suspended", 0, 0)
    assert all(map(is_mapped, places + second))  # reserved: nobody else gets them
    arena.resume()
    backup.restore()
    assert equal(tensors, before) and num_files() == 2
    arena.pair()
    assert [twin.data_ptr() for twin in twins(arena, tensors)] == second
    staged = stage(arena, tensors)
    arena.flip()
    assert equal(tensors, staged) and [t.data_ptr() for t in tensors] == places
    arena.flip()
    assert equal(tensors, before)


def test_buffers_beside_the_weights_outlive_a_sleep_that_drops_the_weights(arena):
    weights, buffers = loaded(arena), [filled(arena, 3, seed) for seed in (8, 9)]
    before = copies(buffers)
    inner = weights[0][PAGE // 2 : 2 * PAGE]  # a weight that ends within a page
    rest = weights[0][2 * PAGE :].clone()
    arena.consolidate()
    arena.pair()
    lost = [inner, *weights[1:]]
    backup = asleep(arena, weights, lambda arena: beside(arena, lost))
    arena.resume()
    backup.restore()
    assert equal(buffers, before) and torch.equal(weights[0][2 * PAGE :], rest)
    assert not any(tensor.any() for tensor in lost)
    arena.pair()
    assert equal(twins(arena, buffers), before)


def test_an_arena_that_is_still_loading_can_be_suspended(arena):
    tensors = loaded(arena)
    before = copies(tensors)
    backup = HostCopy(arena, everything(arena))
    arena.suspend()
    tensors.pop(), before.pop()
    assert num_files() == 0
    arena.resume()
    backup.restore()
    assert equal(tensors, before) and arena.stats()["phase"] == "loading"


def test_too_little_memory_to_wake_up_is_reported_in_bytes(arena):
    tensors = paired(arena)
    before, one = copies(tensors), sum(num_bytes for _, num_bytes in arena.runs())
    backup = asleep(arena, tensors)
    limit(arena, budget=one - PAGE)
    with pytest.raises(native.OutOfDeviceMemory) as caught:
        arena.resume()
    assert caught.value.missing_bytes == PAGE and num_files() == 0
    limit(arena, budget=one)
    arena.resume()
    backup.restore()
    with pytest.raises(native.OutOfDeviceMemory) as caught:
        arena.pair()
    assert caught.value.missing_bytes == one and equal(tensors, before)
    limit(arena)
    arena.pair()
    assert equal(twins(arena, tensors), before)


@pytest.mark.parametrize("skip", range(2))
@pytest.mark.parametrize("call", ["create", "map", "unmap", "set_access"])
@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_a_sleep_that_fails_changes_nothing_and_can_be_repeated(
    arena, step, call, skip
):
    tensors = paired(arena)
    before, backup = copies(tensors), HostCopy(arena, everything(arena))
    arena.unpair()
    for each in ("suspend", "resume"):
        limit(arena, call=call, skip=skip, times=each == step)
        try:
            getattr(arena, each)()
        except native.ArenaFault as fault:
            assert fault.call == call
            assert num_files() == 0 if each == "resume" else equal(tensors, before)
            getattr(arena, each)()
    limit(arena)
    backup.restore()
    arena.pair()
    assert equal(tensors, before) and equal(twins(arena, tensors), before)


@pytest.mark.parametrize("skip", range(2))
def test_shadow_memory_that_cannot_be_released_stays_usable(arena, skip):
    tensors = paired(arena)
    before = copies(tensors)
    limit(arena, call="unmap", skip=skip, times=1)
    with pytest.raises(native.ArenaFault):
        arena.unpair()
    limit(arena)
    staged = stage(arena, tensors)
    assert equal(tensors, before)
    arena.flip()
    assert equal(tensors, staged)


def test_an_arena_that_is_closed_asleep_leaves_nothing():
    with opened() as arena:
        tensors = paired(arena)
        places = [t.data_ptr() for t in tensors + twins(arena, tensors)]
        asleep(arena, tensors)
        with pytest.raises(RuntimeError, match="must be paired, and it is suspended"):
            arena.flip()
        del tensors
    assert num_files() == 0 and not any(map(is_mapped, places))
