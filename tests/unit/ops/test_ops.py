"""Counts of non-finite values, rejected tensors, and the type Digest."""

import sys

import pytest
import torch

from vllm.inflight import ops
from vllm.inflight.ops import Digest, digest, digest_reference, digest_slice, digests


def random_bits(dtype: torch.dtype, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size *= dtype.itemsize
    data = torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


# Values that are not finite


@pytest.mark.parametrize("dtype", ops.NONFINITE, ids=str)
@pytest.mark.parametrize("size", [1, 7, 255, 4099])
def test_nonfinite_values_are_counted_as_torch_does(dtype, size):
    tensor = random_bits(dtype, size)
    wide = tensor if dtype.itemsize > 1 else tensor.float()
    expected = int((~wide.isfinite()).sum())
    assert ops.count_nonfinite([tensor]) == [expected]
    assert digests._nonfinite_reference(tensor, ops.NONFINITE[dtype]) == expected


PLAIN = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("served_as", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_values_not_finite_in_the_served_dtype_are_counted(dtype, served_as):
    limit = ops.nonfinite_limit(dtype, served_as)
    integer = ops.INTEGERS[dtype.itemsize]
    about = torch.arange(max(0, limit - 50), limit + 50).to(integer).view(dtype)
    tensor = torch.cat([about, -about, random_bits(dtype, 4001)])
    expected = int((~tensor.to(served_as).isfinite()).sum())
    assert expected >= 100
    assert ops.count_nonfinite([tensor], served_as=[served_as]) == [expected]
    assert digests._nonfinite_reference(tensor, limit) == expected
    both = ops.count_nonfinite([tensor, tensor], served_as=[None, served_as])
    assert both == [int((~tensor.isfinite()).sum()), expected]


def test_values_that_round_to_a_finite_number_do_not_count_as_nonfinite():
    def first(dtype, served_as):
        bits = torch.tensor(ops.nonfinite_limit(dtype, served_as))
        return bits.to(ops.INTEGERS[dtype.itemsize]).view(dtype).item()

    assert first(torch.float32, torch.float16) == 65520.0
    assert first(torch.bfloat16, torch.float16) == 65536.0
    assert 3.39e38 < first(torch.float32, torch.bfloat16) < 3.4e38
    assert first(torch.float16, torch.bfloat16) == float("inf")
    assert first(torch.bfloat16, torch.float32) == float("inf")


FP8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_fp8_pattern_is_judged(dtype):
    every = torch.arange(256).to(torch.uint8).view(dtype)
    expected = int((~every.float().isfinite()).sum())
    assert expected > 0
    square = every.view(16, 16)
    assert ops.count_nonfinite([every, square.t()]) == [expected] * 2
    limit = ops.NONFINITE.get(dtype, 0)
    assert digests._nonfinite_reference(every, limit) == expected


def test_nonfinite_values_are_found_in_views_and_by_threads():
    tensor = torch.zeros(700, 1031, dtype=torch.bfloat16)
    tensor[3::7, 5] = float("nan")
    tensor[:, 1030] = float("-inf")
    views = [tensor, tensor.t(), tensor[:, 1:], tensor[::7], torch.ones(3).int()]
    expected = [800, 800, 800, 100, 0]
    assert ops.count_nonfinite(views) == expected
    assert ops.count_nonfinite(views, num_threads=3) == expected


# Refusals and the small type


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with freed memory, as trainers leave gathered shards."""
    tensor.untyped_storage().resize_(0)
    return tensor


def wrapper(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that wraps others, as quantised weights do."""
    return torch.Tensor._make_wrapper_subclass(
        type("Wrapper", (torch.Tensor,), {"__torch_dispatch__": None}), tensor.shape
    )


@pytest.mark.parametrize(
    "tensor, remedy",
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64.*view_as_real"),
        (torch.zeros(2, 2).to_sparse(), "sparse.*to_dense"),
        (torch.zeros(2, device="meta"), "meta.*load it"),
        (freed(torch.zeros(2, 3)), r"Tensor of shape \(2, 3\) has no memory.*gather"),
        (wrapper(torch.zeros(2)), "Wrapper of shape .* has no memory.*gather"),
    ],
)
def test_a_tensor_that_has_no_digest_is_rejected_with_a_remedy(tensor, remedy):
    for function in (lambda t: digest([t]), digest_reference):
        with pytest.raises(TypeError, match=remedy):
            function(tensor)


def test_a_slice_outside_the_whole_is_rejected():
    with pytest.raises(ValueError, match=r"\(4,\) at \(3,\) is not inside .*\(6,\)"):
        digest_slice(torch.zeros(4), (6,), (3,))
    with pytest.raises(ValueError, match="not inside"):
        digest_slice(torch.zeros(4), (6, 1), (0, 0))
    with pytest.raises(ValueError, match="num_threads"):
        digest([torch.zeros(4)], num_threads=0)


def test_without_the_native_core_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.inflight._C", None)
    with pytest.raises(ImportError, match="make build"):
        digest([torch.zeros(4)])


def test_a_digest_round_trips_through_hex():
    (found,) = digest([torch.ones(3)])
    assert Digest.from_hex(found.hex()) == found
    assert found - found == Digest.ZERO
    for wrong in ("", "0" * 31, "G" * 32, "A" * 32):
        with pytest.raises(ValueError, match="32 lower-case hex"):
            Digest.from_hex(wrong)


def test_a_manifest_digest_depends_on_every_field_of_its_entries():
    one = ("w", "bfloat16", (2, 3), Digest(1, 2))
    others = [
        ("v", "bfloat16", (2, 3), Digest(1, 2)),
        ("w", "float16", (2, 3), Digest(1, 2)),
        ("w", "bfloat16", (3, 2), Digest(1, 2)),
        ("w", "bfloat16", (2, 3), Digest(2, 1)),
    ]
    found = {ops.manifest_digest([entry]) for entry in (one, *others)}
    assert len(found | {ops.manifest_digest([]), ops.manifest_digest(others[:2])}) == 7
    with pytest.raises(ValueError, match="'w' is in the manifest twice"):
        ops.manifest_digest([one, one])
