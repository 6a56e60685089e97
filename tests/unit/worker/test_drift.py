"""Drift: the sample tells how far all of a version has moved."""

import gc
import math

import numpy as np
import pytest
import torch

from tests.support.triton_compiler import compile_for_gpu, compiles
from tests.support.triton_interpreter import succeeds
from vllm.inflight.worker.verify.drift import (
    OF_KERNEL,
    SIZE,
    Sampler,
    drift,
    squares_by_kernel,
    squares_by_torch,
    warm,
)

LARGE, SMALL = "model.layers.0.mlp.up_proj.weight", "model.layers.0.norm.weight"
OTHER, TOP = "model.layers.11.norm.weight", "model.norm.weight"


def version(seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {LARGE: (700, 300), SMALL: (64,), OTHER: (64,), TOP: (5000,)}
    return {n: torch.randn(s, generator=random) for n, s in shapes.items()}


def samples(named):
    sampler = Sampler()
    pairs = list(named.items())
    sampler.add(pairs[:2])
    sampler.add(pairs[2:])
    return sampler.samples()


class AllBut:
    """A plan by which every tensor but one is where it ends up."""

    def __init__(self, name):
        self._name = name

    def is_home(self, name, tensor):
        return name != self._name


def test_a_tensor_received_in_place_is_sampled_when_the_update_is_complete():
    named, views = version(), {}
    for step in (1.0, 3.0):
        sampler = Sampler(views, AllBut(LARGE))
        sampler.add(list(named.items()))
        for tensor in named.values():
            if tensor is not named[LARGE]:
                tensor.add_(step)  # what comes later is of the same version
        expected = samples(named)
        found = sampler.samples()
        assert found.places.keys() == expected.places.keys() == named.keys()
        for name in named:
            assert torch.equal(found[name], expected[name]), name


def test_samples_are_kept_on_the_engines_device_wherever_they_came_from():
    sampler = Sampler(device=torch.device("meta"))
    sampler.add(list(version().items()))
    assert {block.device.type for block in sampler.samples().blocks} == {"meta"}


def test_tensors_of_the_host_and_of_a_device_may_come_together():
    sampler = Sampler(device=torch.device("meta"))
    tensor = torch.ones(5)
    sampler.add([("a", tensor), ("b", tensor.to("meta")), ("c", tensor)])
    found = sampler.samples()
    assert sorted(found.places) == ["a", "b", "c"]
    assert all(found[name].shape == (5,) and found[name].is_meta for name in "abc")


def moved(named, share: float, seed: int = 7):
    """Every tensor, moved by that share of its length in a direction of its own."""
    random = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in named.items():
        step = torch.randn(tensor.shape, generator=random)
        result[name] = tensor + step * (share * tensor.norm() / step.norm())
    return result


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.5])
def test_the_sample_estimates_the_drift_of_all_weights(share):
    old = version()
    found = drift(samples(old), samples(moved(old, share)))
    assert found["overall"] == pytest.approx(share, rel=0.05)
    assert found["layers"]["model.layers.0"] == pytest.approx(share, rel=0.05)


def test_the_drift_of_a_single_changed_layer_is_reported():
    old = version()
    new = old | {OTHER: old[OTHER] * 1.5}
    found = drift(samples(old), samples(new))
    assert found["layers"] == {
        "model.layers.0": 0.0,
        "model.layers.11": pytest.approx(0.5),
        "model.norm": 0.0,
    }
    assert 0 < found["overall"] < 0.5


def test_equal_weights_have_no_drift():
    assert drift(samples(version()), samples(version()))["overall"] == 0.0


def test_the_drift_is_unknown_without_a_version_before():
    assert drift(None, samples(version())) is None


def test_a_tensor_that_only_one_version_has_is_left_out():
    """One of another size is no tensor of both, either."""
    old, new = version(), moved(version(), 0.1)
    del old[TOP]
    new[SMALL] = new[SMALL][:10] * 100
    found = drift(samples(old), samples(new))
    assert set(found["layers"]) == {"model.layers.0", "model.layers.11"}
    both = ({name: named[name] for name in (LARGE, OTHER)} for named in (old, new))
    assert found == drift(*map(samples, both))


def test_the_drift_from_all_zero_weights_is_unknown():
    old = {TOP: torch.zeros(9)}
    assert drift(samples(old), samples({TOP: torch.ones(9)}))["overall"] is None
    assert drift(samples(old), samples(old))["overall"] == 0.0


def test_a_sample_is_small_and_of_any_kind_of_tensor():
    named = {
        "a.weight": torch.randn(40, 5000).to(torch.bfloat16).t(),
        "b.weight": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "c.weight": torch.arange(10),
        "d.weight": torch.empty(0, 3),
        "e.weight": torch.randn(9000)[1:].half(),
    }
    taken = samples(named)
    assert [len(taken[name]) for name in named] == [SIZE, 15, 10, 0, SIZE]
    assert drift(taken, taken)["overall"] == 0.0


def test_tensors_of_any_size_are_sampled_together():
    sizes = (SIZE - 1, SIZE, SIZE + 1, 3 * SIZE)
    taken = samples({f"{n}.weight": torch.randn(n) for n in sizes})
    found = [len(taken[f"{n}.weight"]) for n in sizes]
    assert found == [SIZE - 1, SIZE, SIZE, SIZE]


def test_a_sample_outlives_the_memory_it_was_taken_from():
    named = version()
    taken = samples(named)
    for tensor in named.values():
        tensor.zero_()
    assert drift(taken, samples(version()))["overall"] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_leaves_the_drift_unknown(value: float) -> None:
    old = samples({"a.0.w": torch.ones(8), "a.1.w": torch.ones(8)})
    new = samples({"a.0.w": torch.full((8,), value), "a.1.w": torch.full((8,), 2.0)})
    assert drift(old, new) == {"overall": None, "layers": {"a.0": None, "a.1": 1.0}}
    assert drift(new, old)["overall"] is None


@pytest.mark.parametrize("first", ["a.0.w", "b.7.w", "c.w"])
def test_versions_that_came_in_another_order_are_compared_by_name(first):
    named = {f"{m}.{n}.w": torch.full((8,), n + 1.0) for m in "ab" for n in range(40)}
    named["c.w"] = torch.ones(5)
    other = {first: named[first]} | dict(reversed(named.items()))
    other["b.7.w"] = named["b.7.w"] * 2
    layers = drift(samples(named), samples(other))["layers"]
    assert layers.pop("b.7") == 1.0
    assert set(layers.values()) == {0.0}
    assert len(layers) == 80


def test_the_samples_of_a_subset_replace_those_of_the_version_before():
    old, new = version(), moved(version(), 0.1)
    base, part = samples(old), samples({LARGE: new[LARGE], TOP: new[TOP]})
    whole = part.over(base)
    for name, tensor in (old | {LARGE: new[LARGE], TOP: new[TOP]}).items():
        assert torch.equal(whole[name], samples({name: tensor})[name]), name
    assert set(drift(base, whole)["layers"]) == {*drift(base, base)["layers"]}
    assert whole.only(lambda name: name != TOP).places.keys() == old.keys() - {TOP}


def test_samples_of_repeated_subsets_keep_no_unused_memory():
    whole = samples(version())
    most = len(whole.blocks) + len(samples({TOP: torch.ones(5000)}).blocks)
    for step in range(9):
        part = samples({TOP: torch.full((5000,), float(step))})
        whole = part.over(whole)
        assert len(whole.blocks) <= most
    assert torch.equal(whole[TOP], samples({TOP: torch.full((5000,), 8.0)})[TOP])


@pytest.mark.parametrize(("num", "num_blocks"), [(60, 1), (400, 4), (1600, 1)])
def test_no_block_of_samples_takes_a_size_for_which_pytorch_keeps_20_mib(
    num: int, num_blocks: int
):
    named = {
        f"layers.{n}.w": torch.full((2 * SIZE,), float(n)).bfloat16()
        for n in range(num)
    }
    sampler, pairs = Sampler(), list(named.items())
    for first in range(0, num, 7):
        sampler.add(pairs[first : first + 7])
    found = sampler.samples()
    assert len(found.blocks) == num_blocks
    assert all(not 1 << 20 < block.nbytes <= 10 << 20 for block in found.blocks)
    for name, tensor in named.items():
        assert torch.equal(found[name], samples({name: tensor})[name]), name


def test_samples_of_many_tensors_are_few_objects_for_garbage_collection():
    named = {f"layers.{n}.w": torch.ones(4) for n in range(3000)}
    gc.collect()
    before = len(gc.get_objects())
    taken = samples(named)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert len(taken.places) == 3000


def by_kernel() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    random = torch.Generator().manual_seed(0)
    kinds = []
    for dtype in OF_KERNEL:
        for size in (1, 64, 1000, SIZE):
            old, new = (
                torch.randn(9, size, generator=random).to(dtype) for _ in range(2)
            )
            rows = np.array([0, 1, 2, 7]), np.array([3, 8, 0, 1])
            kinds.append((old, new, *rows))
    kinds[-1][1][0, 5] = torch.nan
    found, expected = squares_by_kernel(kinds), squares_by_torch(kinds)
    assert found.shape == (2, 4 * len(kinds)) and found.isnan().sum() == 1
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-5, atol=0, equal_nan=True
    )


def compile_kernel() -> None:
    """Compile the kernel for a GPU that need not be there."""
    from vllm.inflight.worker.verify import triton_kernels as kernels

    assert kernels.NUMBERS.keys() == set(OF_KERNEL)
    for number in kernels.NUMBERS.values():
        constants = [("NUMBER", number), ("BLOCK", kernels.BLOCK)]
        tables = {"rows": "*i64", "found": "*fp32", "num": "i32"}
        compile_for_gpu(kernels._squares, tables, constants)


def warmed() -> None:
    """Warming runs the kernel for every dtype that it compares."""
    from vllm.inflight.worker.verify import drift as module
    from vllm.inflight.worker.verify import triton_kernels as kernels

    ran, real = [], kernels.squares

    def run(rows, found, dtype):
        ran.append(dtype)
        real(rows, found, dtype)

    kernels.squares = run
    module._has_kernel = lambda old, new: True
    warm(torch.device("cpu"))
    assert tuple(ran) == OF_KERNEL


@pytest.mark.seconds
@pytest.mark.parametrize("check", [by_kernel, warmed])
def test_the_kernel_finds_the_squares_that_torch_finds(check):
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:{check.__name__}")


@pytest.mark.seconds
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    compiles(f"{__name__}:compile_kernel", tmp_path)
