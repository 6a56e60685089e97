"""The digest compared with its definition and its reference."""

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.inflight import _C, ops
from vllm.inflight.ops import Digest, digest, digest_reference, digest_slice, digests
from vllm.inflight.ops.reference import chunk_key, page_key

CSRC = Path(__file__).parents[3] / "csrc"
PAGE = (Path(__file__).parents[3] / "docs" / "digest.md").read_text()
DEFINED: dict = {}
exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], DEFINED)

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
]


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    size = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(high, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def table(header: str) -> list[list[str]]:
    lines = PAGE.split(header)[1].split("\n\n")[0].splitlines()[2:]
    return [re.sub("[|`]", " ", line).split() for line in lines]


def number(text: str) -> int:
    power, sign, rest = re.fullmatch(r"(?:2\^(\d+))?([+-]?)(\d*)", text).groups()
    return (2 ** int(power) if power else 0) + int((sign + rest) or 0)


# The definition


def test_the_native_op_and_the_reference_produce_every_test_vector_of_the_page():
    for offset, length, expected in table("| offset | length | digest |"):
        start, size = number(offset), int(length)
        data = torch.tensor([(37 * o + 11) % 256 for o in range(start, start + size)])
        at = (data.to(torch.uint8), (2**42,), (start,))
        assert digest_slice(*at).hex() == expected, offset
        assert digest_reference(*at).hex() == expected, offset


def test_every_key_of_the_page_comes_out_of_the_code():
    for chunk, *expected in table("| chunk | g | k |"):
        c = number(chunk)
        pair = chunk_key(torch.tensor(c), page_key(c >> 32))
        assert [f"{int(part):08x}" for part in pair] == expected
        assert [f"{part:08x}" for part in DEFINED["key"](c)] == expected


def test_the_manifest_of_the_page_comes_out_of_the_code():
    def content(num_bytes: int) -> Digest:
        return Digest.from_hex(
            DEFINED["digest"](bytes((37 * o + 11) % 256 for o in range(num_bytes)))
        )

    entries = [
        ("w", "bfloat16", (2, 3), content(12)),
        ("b", "float32", (1,), content(4)),
    ]
    assert f"`{ops.manifest_digest(entries)}`" in PAGE
    assert ops.manifest_digest(entries[::-1]) == ops.manifest_digest(entries)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 7, 8, 9, 31, 64, 129, 1001])
def test_native_reference_and_definition_agree(dtype, size):
    tensor = random_tensor(dtype, size)
    (native,) = digest([tensor])
    assert native == digest_reference(tensor)
    assert native.hex() == DEFINED["digest"](raw(tensor))


@pytest.mark.parametrize("kernel", _C.kernels())
@pytest.mark.parametrize("start", [0, 3, 2**35 - 4096, 2**35 - 13])
def test_every_kernel_of_this_processor_agrees_with_the_reference(kernel, start):
    tensor = random_tensor(torch.uint8, 10_007)
    try:
        _C.use_kernel(kernel)
        native = digest_slice(tensor, (2**36,), (start,))
    finally:
        _C.use_kernel(_C.kernels()[0])
    assert native == digest_reference(tensor, (2**36,), (start,))


EVERY_KERNEL = """
#include "digest.h"
int main() {
  std::vector<unsigned char> data(8192, 0xA5);
  inflight::Sums sums;
  for (const inflight::Kernel& kernel : inflight::kernels())
    kernel.chunks(data.data(), data.size() / 8, 7, inflight::page_key(0), sums);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_kernel_does_what_the_language_leaves_undefined(tmp_path):
    source, program = tmp_path / "every_kernel.cpp", tmp_path / "every_kernel"
    source.write_text(EVERY_KERNEL)
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    command = ["g++", "-std=c++17", *checks, "-I", CSRC, source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_tensor_larger_than_one_reference_leaf_agrees():
    tensor = random_tensor(torch.bfloat16, 1201, 2003)
    assert digest([tensor]) == [digest_reference(tensor)]
    rows = (tensor[:, 3:1700], tensor.shape, (0, 3))
    assert digest_slice(*rows) == digest_reference(*rows)


VIEWS = {
    "transposed": lambda t: t.mT,
    "strided": lambda t: t[1::2, :, ::3],
    "permuted": lambda t: t.permute(2, 0, 1),
    "expanded": lambda t: t[:1].expand(4, -1, -1),
    "one element": lambda t: t[2, 3, 4],
    "no element": lambda t: t[:, :0],
    "unaligned": lambda t: t.reshape(-1)[1:],
    "negated lazily": lambda t: torch.complex(t.float(), t.float()).conj().imag,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64], ids=str)
def test_a_view_has_the_digest_of_its_dense_copy(view, dtype):
    seen = view(random_tensor(dtype, 5, 6, 7))
    dense = seen.resolve_neg().clone(memory_format=torch.contiguous_format)
    assert digest([seen]) == digest([dense]) == [digest_reference(seen)]


def test_a_view_is_read_in_few_blocks():
    seen = random_tensor(torch.float16, 5, 600, 7).permute(1, 2, 0)
    assert len(list(digests._blocks(seen, ops.row_major(seen.shape), 0))) == 5
    dense = seen.clone(memory_format=torch.contiguous_format)
    assert digest([seen]) == digest([dense])


def test_the_digest_does_not_depend_on_the_dtype():
    tensor = random_tensor(torch.bfloat16, 12, 10)
    assert digest([tensor]) == digest([tensor.view(torch.uint8)])


def test_the_digest_does_not_depend_on_the_number_of_threads():
    tensors = [random_tensor(torch.bfloat16, n, 1023) for n in (1, 700, 3000, 0, 41)]
    alone = digest(tensors)
    assert alone == [d for t in tensors for d in digest([t])]
    assert all(digest(tensors, num_threads=n) == alone for n in (2, 3, 8, 64))


# Slices


@st.composite
def cuts(draw):
    """A tensor, cut repeatedly along random dimensions."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    dtype = draw(
        st.sampled_from([torch.uint8, torch.bfloat16, torch.int32, torch.int64])
    )
    tensor = random_tensor(dtype, *shape, seed=draw(st.integers(0, 99)))
    pieces = [(tensor, (0,) * len(shape))]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        piece, offsets = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, piece.shape[dim]))
        moved = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
        pieces.append((piece.narrow(dim, 0, at), offsets))
        pieces.append((piece.narrow(dim, at, piece.shape[dim] - at), moved))
    return tensor, pieces


@given(cuts())
@settings(deadline=None, max_examples=150)
def test_the_digests_of_slices_add_up_to_the_digest_of_the_tensor(cut):
    tensor, pieces = cut
    for function in (digest_slice, digest_reference):
        parts = [function(piece, tensor.shape, at) for piece, at in pieces]
        assert sum(parts, Digest.ZERO) == digest([tensor])[0]


def test_an_added_digest_can_be_subtracted():
    tensor = random_tensor(torch.float16, 64, 33)
    left = digest_slice(tensor[:, :17], tensor.shape, (0, 0))
    right = digest_slice(tensor[:, 17:], tensor.shape, (0, 17))
    assert digest([tensor])[0] - left == right


@pytest.mark.gpu
def test_a_gpu_tensor_has_the_digest_of_its_cpu_copy():
    tensor = random_tensor(torch.bfloat16, 513, 1025)
    assert digest([tensor.cuda()]) == digest([tensor])
    assert ops.count_nonfinite([tensor.cuda()]) == ops.count_nonfinite([tensor])


# What is told apart

ACCIDENTS = {
    "shifted by one": lambda t: t.roll(1),
    "reversed": lambda t: t.flip(0),
    "zeroed": torch.zeros_like,
    "rows permuted": lambda t: t.view(32, 64).roll(1, 0).reshape(-1),
    "columns permuted": lambda t: t.view(32, 64).roll(1, 1).reshape(-1),
    "neighbours swapped": lambda t: changed(t, [40, 41], t[[41, 40]]),
    "distant ones swapped": lambda t: changed(t, [5, 2000], t[[2000, 5]]),
    "a pair negated": lambda t: changed(t, [9, 77], -t[[9, 77]]),
    "one gains, one loses": lambda t: changed(
        t, [100, 1500], t[[100, 1500]] + torch.tensor([7, -7])
    ),
    "a rectangle gains and loses": lambda t: changed(
        t, [64, 72, 192, 200], t[[64, 72, 192, 200]] + torch.tensor([5, -5, -5, 5])
    ),
}


def changed(tensor, where, what):
    tensor = tensor.clone()
    tensor[where] = what.to(tensor.dtype)
    return tensor


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("accident", ACCIDENTS.values(), ids=ACCIDENTS.keys())
def test_typical_corruptions_change_both_sums_of_the_digest(accident, dtype):
    before = torch.arange(2048).mul(37).remainder(101).add(10).to(dtype)
    difference = digest([accident(before)])[0] - digest([before])[0]
    assert difference.a != 0 and difference.b != 0


def test_every_single_bit_counts():
    tensor = random_tensor(torch.uint8, 61)
    flipped = [tensor]
    for place in range(61):
        for bit in range(8):
            other = tensor.clone()
            other[place] ^= 1 << bit
            flipped.append(other)
    assert len({d.hex() for d in digest(flipped)}) == len(flipped)


def test_the_digest_depends_on_the_number_of_zeros():
    sizes = range(1, 200)
    found = digest([torch.zeros(n, dtype=torch.bfloat16) for n in sizes])
    alone = torch.zeros(1, dtype=torch.bfloat16)
    found += [digest_slice(alone, (2**40,), (n,)) for n in (1, 2**20, 2**33, 2**33 + 1)]
    assert len(set(found)) == len(found)


def test_an_index_beyond_32_bits_counts():
    tensor = random_tensor(torch.bfloat16, 8)
    starts = [7, 7 + 2**32, 7 + 2**34, 7 + 2**36]
    found = {digest_slice(tensor, (2**40,), (start,)) for start in starts}
    assert len(found) == len(starts)
