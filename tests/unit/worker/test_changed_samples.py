"""The samples of a version become those of the next one, as a delta changes them."""

from itertools import product

import numpy as np
import pytest
import torch

from tests.support.deltas import (
    integers,
    parts_of,
    random_bits,
    scattered,
    with_changes,
)
from tests.support.triton_compiler import compile_for_gpu, compiles
from tests.support.triton_interpreter import succeeds
from vllm.inflight import ops
from vllm.inflight.delta import decode
from vllm.inflight.delta.device_decode import Launches
from vllm.inflight.worker.delta.changed_samples import ChangedSamples
from vllm.inflight.worker.verify.drift import SIZE, Sampler, Samples, drift

Weights = dict[str, torch.Tensor]
SIZES = (1, 15, 64, 1000, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE + 63, 90_001)
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)


def version() -> Weights:
    return {
        f"{dtype}.{size}.w": random_bits(dtype, size, size)
        for dtype in DTYPES
        for size in SIZES
    }


def samples_of(weights: Weights) -> Samples:
    sampler = Sampler()
    sampler.add(list(weights.items()))
    return sampler.samples()


def changed(old: Weights, share: float, most: int) -> Weights:
    """Weights with other bits in that share of the elements, and in the last one."""
    return {
        name: with_changes(
            tensor,
            [*scattered(len(tensor) - 1, share, len(tensor)).tolist(), len(tensor) - 1],
            most=most,
        )
        for name, tensor in old.items()
    }


def written(old: Weights, new: Weights, kept: Samples, *, by_kernel: bool) -> Samples:
    """The samples of the new weights, as a delta writes them."""
    sizes = np.array([len(tensor) for tensor in old.values()])
    made = ChangedSamples(kept, [*old], sizes)
    for part in parts_of(
        [(old[name], new[name]) for name in old], max_part_bytes=1 << 17
    ):
        part.check([len(t) for t in old.values()], [t.itemsize for t in old.values()])
        changes = decode(part)
        if by_kernel:
            launches = Launches(torch.device("cpu"))
            made.write(changes, launches)
            launches.run()
        else:
            for each in changes:
                made.write_on_host(each)
    return made.samples()


def are_equal(found: Samples, expected: Samples) -> bool:
    return found.places == expected.places and all(
        torch.equal(integers(a), integers(b))
        for a, b in zip(found.blocks, expected.blocks, strict=True)
    )


def check_chain(*, by_kernel: bool) -> None:
    """Few and many changes, raw and as differences, one version after another."""
    old = version()
    kept = samples_of(old)
    before = [block.clone() for block in kept.blocks]
    for share, most in ((0.01, 0), (0.3, 2), (1.0, 90), (0.002, 1)):
        new = changed(old, share, most)
        found = written(old, new, kept, by_kernel=by_kernel)
        assert are_equal(found, samples_of(new)), share
        if share == 0.01:  # those of the served version stay
            assert all(
                torch.equal(integers(a), integers(b))
                for a, b in zip(kept.blocks, before, strict=True)
            )
        old, kept = new, found


def test_a_delta_changes_the_samples_as_the_new_weights_would():
    check_chain(by_kernel=False)


def test_a_tensor_without_a_sample_is_passed_over():
    old = version()
    new = changed(old, 0.1, 0)
    first, *_ = old
    kept = samples_of(old).only(lambda name: name != first)
    found = written(old, new, kept, by_kernel=False)
    expected = samples_of(new).only(lambda name: name != first)
    assert found.places.keys() == old.keys() - {first}
    for name in found.places:
        assert torch.equal(integers(found[name]), integers(expected[name])), name


def test_the_drift_after_deltas_is_that_of_the_versions():
    old = {f"layers.{n}.w": torch.randn(3000 + 4000 * n) for n in range(5)}
    new = {
        name: tensor + (torch.rand(len(tensor)) < 0.2) for name, tensor in old.items()
    }
    kept = samples_of(old)
    found = written(old, new, kept, by_kernel=False)
    assert drift(kept, found) == drift(samples_of(old), samples_of(new))
    part = samples_of({"layers.3.w": new["layers.3.w"]}).over(kept)
    one = old | {"layers.3.w": new["layers.3.w"]}
    assert drift(kept, part) == drift(samples_of(old), samples_of(one))
    # A delta after a subset, whose samples lie in other places.
    found = written(one, new, part, by_kernel=False)
    assert drift(part, found) == drift(samples_of(one), samples_of(new))
    assert drift(kept, found) == drift(samples_of(old), samples_of(new))


def kernels() -> None:
    """Runs where TRITON_INTERPRET was set before Triton was imported."""
    check_chain(by_kernel=True)


def malformed() -> None:
    """Places that are any numbers write into no other memory than the sample's."""
    from vllm.inflight.worker.delta import triton_kernels as kernels

    random = torch.Generator().manual_seed(0)
    for size, step in ((9, 64), (SIZE, 64), (SIZE, 5000)):
        memory = torch.zeros(3 * SIZE, dtype=torch.int16)
        sample = memory[SIZE : SIZE + size]
        bits = torch.ones(500, dtype=torch.int16)
        for most, dtype in product(
            (SIZE, 1 << 20, 1 << 62), (torch.int32, torch.int64)
        ):
            most = min(most, torch.iinfo(dtype).max)
            places = torch.randint(-most, most, (500,), generator=random).to(dtype)
            numbers = [places.data_ptr(), bits.data_ptr(), len(places), 1]
            row = torch.tensor([[*numbers, sample.data_ptr(), size, step]])
            kernels.sample(row, 2, place_bytes=dtype.itemsize)
            assert not memory[:SIZE].any() and not memory[SIZE + size :].any()


def compile_kernel() -> None:
    """Compile the kernel for a GPU that need not be there."""
    from vllm.inflight.worker.delta import triton_kernels as kernels

    for integer in kernels.INTEGERS.values():
        constants = [("INTEGER", integer), ("COLUMNS", kernels.SAMPLE_COLUMNS)]
        constants += [("RUNS", kernels.NUM_RUNS), ("RUN", kernels.RUN)]
        constants += [("STEPS", kernels.SEARCH_STEPS)]
        for size in (4, 8):
            place = ("PLACE", kernels.INTEGERS[size])
            compile_for_gpu(kernels._sample, {"rows": "*i64"}, [place, *constants])


@pytest.mark.seconds
@pytest.mark.parametrize("check", [kernels, malformed])
def test_the_kernel_changes_what_torch_would(check):
    pytest.importorskip("triton", reason="Triton is not installed")
    succeeds(f"{__name__}:{check.__name__}")


@pytest.mark.seconds
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    compiles(f"{__name__}:compile_kernel", tmp_path)


def test_words_of_samples_are_those_of_the_codec():
    assert {dtype.itemsize for dtype in DTYPES} == ops.INTEGERS.keys()
