"""The arena on a GPU: torch allocates in it, and captured graphs survive a flip."""

import threading
import time

import pytest
import torch

from vllm.inflight.errors import ConfigError, OutOfDeviceMemory
from vllm.inflight.worker.memory.arena import Arena
from vllm.inflight.worker.memory.host_copy import HostCopy, everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def arena():
    with Arena.open(torch.device("cuda")) as arena:
        yield arena
        torch.cuda.synchronize()


def weight(size=2048):
    return torch.randn(size, size, dtype=torch.bfloat16, device="cuda")


def paired(arena, num_weights=4):
    with arena.loading():
        weights = [weight() for _ in range(num_weights)]
    arena.consolidate()
    arena.pair()
    return weights


class Captured:
    """A product of one static input with every weight, as a CUDA graph."""

    def __init__(self, weights):
        self.input = weight()
        self._out = torch.empty_like(self.input)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # warm up where the capture will run
            self._run(weights)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._run(weights)

    def _run(self, weights):
        self._out.copy_(self.input)
        for each in weights:
            self._out.copy_(torch.mm(self._out, each) / 50)

    def __call__(self):
        self._graph.replay()
        torch.cuda.synchronize()
        return self._out.clone()


def test_tensors_made_while_loading_are_in_the_arena(arena):
    outside = weight()
    with arena.loading():
        inside, small = weight(), torch.ones(3, device="cuda")
        gone = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        assert arena.contains(gone)
        del gone
    assert arena.contains(inside) and arena.contains(small)
    assert not arena.contains(outside) and not arena.contains(weight())
    stats = arena.stats()
    assert stats["backed_bytes"] == stats["live_bytes"] < 64 * MIB


def test_consolidating_moves_no_tensor_and_no_byte(arena):
    with arena.loading():
        weights = [weight(64 * (1 + i % 40)) for i in range(200)]
        del weights[5:100:2]
    before, places = [w.clone() for w in weights], [w.data_ptr() for w in weights]
    many = arena.stats()["num_handles"]
    arena.consolidate()
    assert arena.stats()["num_handles"] == len(arena.runs()) <= many
    assert [w.data_ptr() for w in weights] == places
    assert all(map(torch.equal, weights, before))
    assert all(map(arena.contains, weights))


def test_a_captured_graph_computes_with_the_set_that_is_live(arena):
    weights = paired(arena)
    places = [w.data_ptr() for w in weights]
    graph = Captured(weights)
    old, new = [w.clone() for w in weights], [weight() for _ in weights]
    with_old = graph()
    torch._foreach_copy_(weights, new)  # what an update in place would give
    with_new = graph()
    torch._foreach_copy_(weights, old)
    assert not torch.equal(with_old, with_new)

    torch._foreach_copy_([arena.shadow_tensor(w) for w in weights], new)
    assert torch.equal(graph(), with_old)
    arena.flip()
    assert torch.equal(graph(), with_new)
    arena.flip()
    assert torch.equal(graph(), with_old)
    arena.flip()
    arena.settle()
    assert torch.equal(graph(), with_new)
    assert all(
        torch.equal(arena.shadow_tensor(w), o)
        for w, o in zip(weights, old, strict=True)
    )
    assert [w.data_ptr() for w in weights] == places


def test_a_captured_graph_computes_with_the_same_set_after_a_sleep(arena):
    weights = paired(arena)
    graph = Captured(weights)
    with_old = graph()
    twins = [arena.shadow_tensor(w) for w in weights]
    one, free = sum(n for _, n in arena.runs()), torch.cuda.mem_get_info()[0]
    backup = HostCopy(arena, everything(arena))
    arena.unpair()
    arena.suspend()
    assert abs(torch.cuda.mem_get_info()[0] - free - 2 * one) <= 4 * MIB
    arena.resume()
    backup.restore()
    assert torch.equal(graph(), with_old)
    arena.pair()
    for twin, live in zip(twins, weights, strict=True):  # those from before the sleep
        assert torch.equal(twin, live)
        twin.normal_()
    torch.cuda.synchronize()
    assert torch.equal(graph(), with_old)
    arena.flip()
    assert not torch.equal(graph(), with_old)
    arena.flip()
    assert torch.equal(graph(), with_old)


def test_the_second_range_settles_beside_a_stream_that_computes(arena):
    weights = paired(arena)
    graph = Captured(weights)
    for each in weights:
        arena.shadow_tensor(each).normal_()
    torch.cuda.synchronize()
    arena.flip()
    expected = graph()
    failures = []

    def settle():
        try:
            arena.settle()
        except Exception as error:
            failures.append(error)

    for _ in range(20):
        for _ in range(10):
            graph._graph.replay()
        thread = threading.Thread(target=settle)
        thread.start()
        thread.join()
        assert torch.equal(graph(), expected)
        arena.flip()  # there and back, so that there is something to settle
        graph()
        arena.settle()
        arena.flip()
    assert failures == []


def test_a_shadow_tensor_has_the_layout_of_its_live_tensor(arena):
    with arena.loading():
        whole = torch.zeros(64, 48, dtype=torch.bfloat16, device="cuda")
        small = torch.zeros(33, dtype=torch.uint8, device="cuda")
        eighth = small.view(torch.float8_e4m3fn)
    arena.consolidate()
    arena.pair()
    shift = arena.shadow_tensor(whole).data_ptr() - whole.data_ptr()
    for tensor in (whole, whole.t(), whole[3:9, 1:4], small[1:], eighth):
        twin = arena.shadow_tensor(tensor)
        assert (twin.shape, twin.dtype, twin.device, twin.stride()) == (
            *(tensor.shape, tensor.dtype, tensor.device, tensor.stride()),
        )
        assert twin.data_ptr() - tensor.data_ptr() == shift
    with pytest.raises(ValueError, match="does not lie in the arena"):
        arena.shadow_tensor(weight())


def test_a_flip_of_16_gib_exchanges_the_weights_and_prints_its_time(arena, capsys):
    if torch.cuda.mem_get_info()[0] < 50 * GIB:
        pytest.skip("needs 50 GiB of free GPU memory")
    with arena.loading():
        weights = [
            torch.full((GIB,), i, dtype=torch.uint8, device="cuda") for i in range(16)
        ]
    arena.consolidate()
    arena.pair()
    assert len(arena.runs()) <= 4
    for i, each in enumerate(weights):
        arena.shadow_tensor(each).fill_(100 + i)
    flips, settles = [], []
    for turn in range(1, 7):
        torch.cuda.synchronize()
        flips.append(1e3 * arena.flip())
        start = time.perf_counter()
        arena.settle()
        settles.append(1e3 * (time.perf_counter() - start))
        shown = [int(w[-1]) for w in weights]
        assert shown == [100 * (turn % 2) + i for i in range(16)]
    with capsys.disabled():
        print(f"\n16 GiB in {len(arena.runs())} handles:")
        print("  flip   ms", *(f"{ms:.2f}" for ms in flips))
        print("  settle ms", *(f"{ms:.2f}" for ms in settles))


def test_too_little_memory_for_the_shadow_weights_is_reported_in_bytes(arena):
    with arena.loading():
        tensor = torch.full((2 * GIB,), 7, dtype=torch.uint8, device="cuda")
    arena.consolidate()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(OutOfDeviceMemory, match="GiB") as caught:
        arena.pair()
    assert 0.8 * GIB < caught.value.missing_bytes < 1.2 * GIB
    assert arena.stats()["phase"] == "consolidated"
    # There is no memory for a comparison either: byte for byte by the edges of it.
    assert all(tensor[place].item() == 7 for place in (0, GIB, -1))
    del hog
    arena.pair()
    assert bool((arena.shadow_tensor(tensor) == 7).all())


def test_an_arena_that_is_full_is_torchs_out_of_memory():
    with (
        Arena.open(torch.device("cuda"), 64 * MIB) as arena,
        pytest.raises(torch.cuda.OutOfMemoryError) as caught,
        arena.loading(),
    ):
        torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    assert "addresses" in caught.value.__notes__[-1]


def test_expandable_segments_are_rejected():
    configure = torch._C._accelerator_setAllocatorSettings
    configure("expandable_segments:True")
    try:
        with pytest.raises(ConfigError, match="expandable_segments"):
            Arena.open(torch.device("cuda"))
    finally:
        configure("expandable_segments:False")


def test_two_arenas_of_one_gpu_flip_independently():
    device = torch.device("cuda")
    with Arena.open(device) as first, Arena.open(device) as second:
        both = paired(first), paired(second)
        before = [[w.clone() for w in weights] for weights in both]
        for tensor in both[1]:
            second.shadow_tensor(tensor).fill_(3)
        second.flip()
        assert all(map(torch.equal, both[0], before[0]))
        assert all(bool((tensor == 3).all()) for tensor in both[1])
        second.flip()
        assert all(map(torch.equal, both[1], before[1]))


def test_tensors_that_outlive_an_arena_do_not_disturb_the_next():
    free = torch.cuda.mem_get_info()[0]
    with Arena.open(torch.device("cuda")) as first:
        late = paired(first)
    with Arena.open(torch.device("cuda")) as second:
        weights = paired(second)
        before = [w.clone() for w in weights]
        late.clear()
        torch.cuda.empty_cache()
        assert all(map(torch.equal, weights, before))
        assert second.stats()["num_segments"] > 0
    weights.clear()
    before.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - 64 * MIB
