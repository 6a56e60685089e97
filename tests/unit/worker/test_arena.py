"""The arena on host memory: real mappings and real memory, but no GPU."""

import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.inflight.worker.memory import arena as native

PAGE = mmap.PAGESIZE


def opened(reserve_bytes=None):
    return native.Arena.open(torch.device("cpu"), reserve_bytes)


@pytest.fixture
def arena():
    with opened() as arena:
        yield arena


def limit(arena, budget=1 << 40, call="", skip=0, times=0):
    """Let the host's memory run out, or its calls fail."""
    arena._core.arena_host_limits(arena._handle, budget, call, skip, times)


def random_bytes(tensor, seed):
    return tensor.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def filled(arena, num_pages, seed=0):
    return random_bytes(arena.empty((num_pages * PAGE,), torch.uint8), seed)


def loaded(arena, num_runs=2):
    """Tensors of 3, 4, ... pages, with holes between them too large to keep."""
    both = [(filled(arena, 3 + n, seed=n), filled(arena, 2)) for n in range(num_runs)]
    return [tensor for tensor, _ in both]


def paired(arena, num_runs=2):
    tensors = loaded(arena, num_runs)
    arena.consolidate()
    arena.pair()
    return tensors


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def equal(tensors, others):
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def twins(arena, tensors):
    return [arena.shadow_tensor(tensor) for tensor in tensors]


def stage(arena, tensors, seed=7):
    """New bytes, written into the second set."""
    return copies([random_bytes(twin, seed) for twin in twins(arena, tensors)])


def num_files():
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("inflight-arena" in str(x.readlink()) for x in links if x.is_symlink())


def is_mapped(address):
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = ([int(x, 16) for x in line.split()[0].split("-")] for line in lines)
    return any(start <= address < end for start, end in bounds)


def test_consolidating_moves_no_tensor_and_no_byte(arena):
    tensors = [filled(arena, 1 + seed % 3, seed) for seed in range(20)]
    before, places = copies(tensors), [t.data_ptr() for t in tensors]
    assert arena.stats()["num_handles"] == 20
    arena.consolidate()
    assert [t.data_ptr() for t in tensors] == places and equal(tensors, before)
    assert arena.stats()["num_handles"] == len(arena.runs()) == num_files() == 1


def test_memory_that_loading_frees_or_drops_is_returned(arena):
    tensors = [filled(arena, 4), filled(arena, 8), filled(arena, 1)]
    assert (arena.stats()["backed_bytes"], num_files()) == (13 * PAGE, 3)
    del tensors[1]
    assert (arena.stats()["backed_bytes"], num_files()) == (5 * PAGE, 2)
    arena._core.arena_drop(arena._handle, tensors[1].data_ptr())
    assert (arena.stats()["backed_bytes"], num_files()) == (4 * PAGE, 1)
    with pytest.raises(ValueError, match="no segment"):
        arena._core.arena_drop(arena._handle, tensors.pop().data_ptr())
    arena.consolidate()
    tensors.clear()  # part of a run by now
    stats = arena.stats()
    assert (stats["backed_bytes"], stats["wasted_bytes"]) == (4 * PAGE, 4 * PAGE)


def test_small_holes_are_kept_and_large_ones_are_not(arena):
    tensors = [filled(arena, n, seed=n) for n in (150, 1, 150, 2, 150, 40, 150)]
    del tensors[1::2]
    before = copies(tensors)
    arena.consolidate()
    assert [num_bytes // PAGE for _, num_bytes in arena.runs()] == [453, 150]
    assert arena.stats()["wasted_bytes"] == 3 * PAGE
    assert equal(tensors, before) and all(map(arena.contains, tensors))


def test_staged_weights_are_live_after_the_flip_and_not_before(arena):
    tensors = paired(arena)
    before, places = copies(tensors), [t.data_ptr() for t in tensors]
    assert equal(twins(arena, tensors), before)
    staged = stage(arena, tensors)
    assert equal(tensors, before)
    assert arena.flip() > 0
    assert equal(tensors, staged) and [t.data_ptr() for t in tensors] == places
    arena.flip()  # the way back
    assert equal(tensors, before) and equal(twins(arena, tensors), staged)


def test_a_shadow_tensor_is_not_available_until_the_second_range_is_settled(arena):
    tensors = paired(arena)
    before = copies(tensors)
    stage(arena, tensors)
    arena.flip()
    with pytest.raises(RuntimeError, match="settle first"):
        arena.shadow_tensor(tensors[0])
    with ThreadPoolExecutor(1) as thread:
        thread.submit(arena.settle).result()
    arena.settle()
    assert equal(twins(arena, tensors), before)


def test_a_shadow_tensor_has_the_layout_of_its_live_tensor(arena):
    whole = arena.empty((8, 6), torch.bfloat16).fill_(1)
    small = arena.empty((5,), torch.float8_e4m3fn)
    scale = arena.empty((), torch.float32)
    arena.consolidate()
    arena.pair()
    shift = arena.shadow_tensor(whole).data_ptr() - whole.data_ptr()
    for tensor in (
        *(whole, whole.t(), whole[2:, 1:4], whole[3, 5], small[1:]),
        *(scale, scale.expand(3, 2)),
    ):
        twin = arena.shadow_tensor(tensor)
        assert (twin.shape, twin.dtype) == (tensor.shape, tensor.dtype)
        assert twin.stride() == tensor.stride()
        assert twin.data_ptr() - tensor.data_ptr() == shift
    with pytest.raises(ValueError, match=r"float32.*\(4,\).*does not lie in"):
        arena.shadow_tensor(torch.zeros(4))
    assert not arena.contains(torch.zeros(4))
    arena.shadow_tensor(whole[2:, 1:4]).fill_(3)
    arena.flip()
    assert float(whole.float().sum()) == 48 + 2 * 18


Step = st.tuples(st.sampled_from(["make", "make", "free", "drop"]), st.integers(1, 9))


@given(st.lists(Step, max_size=25), st.lists(st.booleans(), max_size=5))
def test_any_sequence_of_arena_calls_keeps_the_expected_contents(steps, settles):
    with opened() as arena:
        tensors, model, dropped = {}, {}, []
        for name, (step, value) in enumerate(steps):
            if step == "make":
                tensors[name] = filled(arena, value, name)
                model[name] = tensors[name].clone()
            elif tensors:
                chosen = sorted(tensors)[value % len(tensors)]
                gone = (tensors.pop(chosen), model.pop(chosen))[0]
                if step == "drop":
                    arena._core.arena_drop(arena._handle, gone.data_ptr())
                    dropped.append(gone)  # freed at last, when the arena is closed
                del gone
        tensors, model = [*tensors.values()], [*model.values()]
        arena.consolidate()
        arena.pair()
        assert equal(tensors, model)
        second = copies(model)
        for seed, settle in enumerate(settles):
            if arena.stats()["settled"]:
                assert equal(twins(arena, tensors), second)
                second = stage(arena, tensors, seed)
            arena.flip()
            model, second = second, model
            assert equal(tensors, model)
            if settle:
                arena.settle()
    assert num_files() == 0


def test_too_little_memory_for_the_shadow_weights_is_reported_in_bytes(arena):
    tensors = loaded(arena)
    arena.consolidate()
    before, stats = copies(tensors), arena.stats()
    limit(arena, budget=2 * stats["backed_bytes"] - PAGE)
    with pytest.raises(native.OutOfDeviceMemory, match="lacks") as caught:
        arena.pair()
    assert caught.value.missing_bytes == PAGE
    assert arena.stats() == stats and equal(tensors, before)


@pytest.mark.parametrize("skip", range(3))
@pytest.mark.parametrize("call", ["create", "map", "unmap", "set_access", "copy"])
@pytest.mark.parametrize("step", ["consolidate", "pair", "flip", "settle"])
def test_a_failed_arena_call_changes_no_byte_and_can_be_repeated(
    arena, step, call, skip
):
    tensors = [filled(arena, 2, seed) for seed in range(5)]
    del tensors[2]  # two runs
    first = copies(tensors)
    for each in ("consolidate", "pair", "flip", "settle"):
        before = copies(tensors)
        after = stage(arena, tensors) if each == "flip" else before
        limit(arena, call=call, skip=skip, times=each == step)
        try:
            getattr(arena, each)()
        except native.ArenaFault as fault:
            assert fault.call == call and fault.driver_code and equal(tensors, before)
            getattr(arena, each)()
        assert equal(tensors, after)
    assert equal(twins(arena, tensors), first)
    limit(arena)


@pytest.mark.parametrize("call, skip", [("map", 0), ("map", 1), ("unmap", 1)])
def test_a_flip_that_cannot_be_undone_is_reported_as_a_torn_arena(arena, call, skip):
    paired(arena)
    limit(arena, call=call, skip=skip, times=2)
    with pytest.raises(native.ArenaTorn, match="cannot be put back"):
        arena.flip()
    limit(arena)
    with pytest.raises(RuntimeError, match="must be paired, and it is torn"):
        arena.flip()


@pytest.mark.parametrize("step", ["pair", "flip", "settle"])
def test_steps_out_of_order_are_rejected(arena, step):
    with pytest.raises(RuntimeError, match=f"{step}: .* must be .*, and it is loading"):
        getattr(arena, step)()
    arena.consolidate()
    with pytest.raises(RuntimeError, match="be loading, and it is consolidated"):
        arena.consolidate()


@pytest.mark.seconds
def test_a_process_may_end_while_its_arena_is_at_work():
    code = """if True:
        import threading, time
        from tests.unit.worker.test_arena import PAGE, filled, opened
        arena = opened()
        tensors = [filled(arena, (64 << 20) // PAGE) for _ in range(4)]
        threading.Thread(target=arena.consolidate, daemon=True).start()
        time.sleep(0.02)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
