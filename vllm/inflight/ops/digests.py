"""Python interface of the native core: content digests, counts of non-finite values.

The digest is defined in docs/digest.md. It is additive: the digests of disjoint slices
of a tensor add up to the digest of the tensor, wherever it is cut.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import itemgetter
from typing import Any, ClassVar

import torch

from vllm.inflight.ops.reference import (
    COUNT,
    PLACE,
    leaves,
    reference_sums,
    row_major,
)

NATIVE: bool = importlib.util.find_spec("vllm.inflight._C") is not None
"""Whether the native core is built. Without it, ops on CPU tensors raise."""

MANIFEST_PREFIX = b"inflight-manifest-1\n"

# The smallest magnitude, read as an integer, that is an infinity or a NaN.
NONFINITE = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,  # no infinities, one NaN
}
# Dtypes with one NaN byte and no infinity. The native core does not count them, since
# it compares magnitudes without their sign.
NAN_BYTES = {
    torch.float8_e8m0fnu: 0xFF,
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest: two 64-bit numbers that add up over disjoint slices, modulo 2**64."""

    ZERO: ClassVar[Digest]

    a: int = 0
    b: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.a < 2**64 and 0 <= self.b < 2**64):
            raise ValueError(f"not two u64: {self.a}, {self.b}")

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.a + other.a) % 2**64, (self.b + other.b) % 2**64)

    def __sub__(self, other: Digest) -> Digest:
        return Digest((self.a - other.a) % 2**64, (self.b - other.b) % 2**64)

    def __iter__(self) -> Iterator[int]:
        return iter((self.a, self.b))

    def hex(self) -> str:
        """32 hex digits: `a`, then `b`."""
        return f"{self.a:016x}{self.b:016x}"

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """The digest of 32 hex digits; raises ValueError for any other text."""
        if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
            raise ValueError(f"a digest has 32 lower-case hex digits, got {text!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))


Digest.ZERO = Digest()


def digest(tensors: Sequence[torch.Tensor], *, num_threads: int = 1) -> list[Digest]:
    """The digest of each tensor; each is a whole checkpoint tensor."""
    return _digests([(t, row_major(t.shape), 0) for t in tensors], num_threads)


def digest_slice(
    tensor: torch.Tensor,
    full_shape: Sequence[int],
    offsets: Sequence[int],
    *,
    num_threads: int = 1,
) -> Digest:
    """The digest of a slice: its share of the whole tensor's digest.

    Args:
        tensor: the slice.
        full_shape: shape of the whole tensor.
        offsets: index of the slice's first element in the whole tensor.
        num_threads: threads that read the slice.

    """
    return _digests([_placed(tensor, full_shape, offsets)], num_threads)[0]


def digest_part(
    tensor: torch.Tensor,
    strides: Sequence[int],
    start: int,
    *,
    num_threads: int = 1,
) -> Digest:
    """The digest of a part at any strides: its share of the whole tensor's digest.

    Args:
        tensor: the part, in any memory layout.
        strides: stride of each of its dimensions, in elements of the whole tensor.
        start: number of its first element in the whole tensor.
        num_threads: threads that read the part.

    """
    return _digests([(tensor, list(strides), start)], num_threads)[0]


def counts_of_part(
    shape: Sequence[int], strides: Sequence[int], start: int, width: int
) -> Digest:
    """The summand of a part's digest that does not depend on the bytes' values.

    Args:
        shape: shape of the part.
        strides: as in `digest_part`.
        start: as in `digest_part`.
        width: bytes per element.

    """
    num = prod(shape)
    # The sum of the numbers of all elements.
    total = num * start
    for size, step in zip(shape, strides, strict=True):
        total += num * step * (size - 1) // 2
    places = 2 * width * width * total + num * width * width
    return Digest(COUNT * num * width % 2**64, PLACE * places % 2**64)


def digest_of_changes(
    places: torch.Tensor,
    old_bits: torch.Tensor,
    new_bits: torch.Tensor,
    width: int,
    *,
    num_threads: int = 1,
) -> Digest:
    """What changed elements add to the digest of their tensor.

    The digest of the new tensor is the digest of the old one plus this.

    Args:
        places: numbers of the changed elements in the whole tensor; int64.
        old_bits: the elements before, of any dtype of that width.
        new_bits: the elements now, likewise.
        width: bytes of an element.
        num_threads: threads that share the work on the host.

    """
    bits = [
        each.detach().contiguous().view(INTEGERS[width])
        for each in (old_bits, new_bits)
    ]
    if places.dtype is not torch.int64 or not all(
        each.shape == places.shape and each.device == places.device for each in bits
    ):
        raise ValueError(
            "every changed element needs an int64 place and its bits, on one device"
        )
    places = places.contiguous()
    if places.device.type == "cpu":
        addresses = [tensor.data_ptr() for tensor in (places, *bits)]
        return Digest(
            *native_core().digest_of_changes(
                *addresses, places.numel(), width, _threads(num_threads)
            )
        )
    from vllm.inflight.ops.triton_kernels import sums_of_changes

    return Digest(*sums_of_changes(places, *bits))


def digest_reference(
    tensor: torch.Tensor,
    full_shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> Digest:
    """`digest_slice` in plain torch arithmetic, on the tensor's own device."""
    full_shape = tensor.shape if full_shape is None else full_shape
    offsets = [0] * tensor.dim() if offsets is None else offsets
    placed, strides, start = _placed(tensor, full_shape, offsets)
    return Digest(*reference_sums(_readable(placed), strides, start))


@functools.cache
def nonfinite_limit(dtype: torch.dtype, served_as: torch.dtype | None = None) -> int:
    """The smallest magnitude that is not finite in the model, as an integer.

    Args:
        dtype: dtype of the tensor.
        served_as: dtype of the model's parameter; None: the same. Large numbers become
            infinities in a shorter format.

    Returns:
        The bits of that magnitude; 0 for a dtype without NaN and Inf.

    """
    own = NONFINITE.get(dtype, 0)
    if served_as is None or served_as.itemsize < 2 or served_as not in NONFINITE:
        return own
    if not own:
        return 0
    # A conversion rounds up or down, but never changes the order of numbers.
    finite, limit = 0, own
    while limit - finite > 1:
        middle = (finite + limit) // 2
        bits = torch.tensor(middle, dtype=INTEGERS[dtype.itemsize], device="cpu")
        if bits.view(dtype).to(served_as).isfinite():
            finite = middle
        else:
            limit = middle
    return limit


def count_nonfinite(
    tensors: Sequence[torch.Tensor],
    *,
    served_as: Sequence[torch.dtype | None] | None = None,
    num_threads: int = 1,
) -> list[int]:
    """Count the infinities and NaNs of each tensor.

    Args:
        tensors: the tensors, on the host or on a GPU.
        served_as: dtype of each model parameter; None: the tensor's own. Numbers that
            become infinities in it count as well.
        num_threads: threads that share the work on the host.

    Returns:
        A count for each tensor; 0 for a dtype without NaN and Inf.

    """
    counts = [0] * len(tensors)
    targets = served_as or [None] * len(tensors)
    blocks = array("Q")
    readable = [_readable(t) for t in tensors]  # alive until the native call ends
    for owner, tensor in enumerate(readable):
        limit = nonfinite_limit(tensor.dtype, targets[owner])
        if not limit and tensor.dtype not in NAN_BYTES:
            continue
        if not limit or tensor.device.type != "cpu":
            counts[owner] = _nonfinite_reference(tensor, limit)
            continue
        width = tensor.element_size()
        sign = 1 << 8 * width - 1
        mask, carry = (
            sum(bits << 8 * byte for byte in range(0, 8, width))
            for bits in (sign - 1, sign - limit)
        )
        # Counts need no order of elements, and memory order has the longest runs.
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
        for *rows, _, _ in _blocks(tensor, tensor.stride(), 0):
            blocks.extend((*rows, mask, carry, owner))
    if blocks:
        packed = native_core().nonfinite(
            bytes(blocks), len(counts), _threads(num_threads)
        )
        counts = [n + m for n, m in zip(counts, array("Q", packed), strict=True)]
    return counts


def nan_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The number of NaNs in a tensor with a dtype of `NAN_BYTES`, on its device."""
    return (tensor.detach().view(torch.uint8) == NAN_BYTES[tensor.dtype]).sum()


def manifest_digest(
    entries: Iterable[tuple[str, str, Sequence[int], Iterable[int]]],
) -> str:
    """The digest of a whole version, in 32 hex digits.

    Args:
        entries: (name, dtype, shape, digest) of every tensor, in any order. A digest is
            a `Digest` or its two numbers.

    Raises:
        ValueError: two tensors have the same name.

    """
    # Texts are in the order of their code points, as their bytes in UTF-8 are.
    found = sorted(entries, key=itemgetter(0))
    last, octets = None, [MANIFEST_PREFIX]
    for name, dtype, shape, content in found:
        if name == last:
            raise ValueError(f"tensor {name!r} is in the manifest twice")
        last = name
        octets += _form(name, dtype, tuple(shape)), _TWO.pack(*content)
    return hashlib.blake2b(b"".join(octets), digest_size=16).hexdigest()


_TWO = struct.Struct("<QQ")


@functools.lru_cache(maxsize=1 << 16)
def _form(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """The bytes of name, dtype and shape in a manifest digest."""
    texts = (text.encode() for text in (name, dtype))
    words = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
    return words + struct.pack(f"<{1 + len(shape)}Q", len(shape), *shape)


Placed = tuple[torch.Tensor, list[int], int]
"""(part, its strides in elements of the whole tensor, number of its first element)."""


def _placed(
    tensor: torch.Tensor, full_shape: Sequence[int], offsets: Sequence[int]
) -> Placed:
    fits = len(full_shape) == len(offsets) == tensor.dim() and all(
        first >= 0 and first + size <= full
        for first, size, full in zip(offsets, tensor.shape, full_shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"a slice of shape {tuple(tensor.shape)} at {tuple(offsets)} "
            f"is not inside a tensor of shape {tuple(full_shape)}"
        )
    strides = row_major(full_shape)
    start = sum(i * s for i, s in zip(offsets, strides, strict=True))
    return tensor, strides, start


def _digests(placed: Sequence[Placed], num_threads: int) -> list[Digest]:
    digests = [Digest.ZERO] * len(placed)
    blocks = array("Q")
    readable = [_readable(t) for t, _, _ in placed]  # alive until the call ends
    for owner, (_, strides, start) in enumerate(placed):
        tensor = readable[owner]
        if tensor.device.type == "cpu":
            for block in _blocks(tensor, strides, start):
                blocks.extend((*block, owner))
        else:
            digests[owner] = Digest(*reference_sums(tensor, strides, start))
    if blocks:
        packed = native_core().digest(
            bytes(blocks), len(digests), _threads(num_threads)
        )
        native = array("Q", packed)
        pairs = zip(native[::2], native[1::2], strict=True)
        digests = [d + Digest(a, b) for d, (a, b) in zip(digests, pairs, strict=True)]
    return digests


def _blocks(
    tensor: torch.Tensor, strides: Sequence[int], start: int
) -> Iterator[tuple[int, ...]]:
    """Blocks of rows that cover a tensor, in the format of csrc/parallel.h."""
    if tensor.numel() == 0:
        return
    # Dimensions (size, stride in memory, stride in the whole tensor). Neighbours are
    # joined if both strides are contiguous.
    dims: list[tuple[int, int, int]] = []
    for size, memory, whole in zip(tensor.shape, tensor.stride(), strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * memory, size * whole):
            size *= dims.pop()[0]
        dims.append((size, memory, whole))
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))  # a row is a single element
    row = dims.pop()[0]
    dims.sort()  # the most rows per block, since each block is a step in Python
    num_rows, memory, whole = dims.pop() if dims else (1, 0, 0)
    width, data = tensor.element_size(), tensor.data_ptr()
    for steps in product(*(range(size) for size, _, _ in dims)):
        ahead = sum(n * dim[1] for n, dim in zip(steps, dims, strict=True))
        index = start + sum(n * dim[2] for n, dim in zip(steps, dims, strict=True))
        yield (
            *(data + ahead * width, num_rows, row * width, memory * width),
            *(index * width, whole * width),
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory: not if it was freed, or wraps other tensors."""
    return tensor.numel() == 0 or tensor.data_ptr() != 0


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its sign resolved; raises TypeError if it has no plain bytes."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"a {tensor.layout} tensor has no digest; use .to_dense()")
    if tensor.is_quantized:
        raise TypeError(
            f"a {tensor.dtype} tensor has no digest; "
            "take .int_repr() and the scales as tensors of their own"
        )
    if tensor.is_complex():
        raise TypeError(
            f"a {tensor.dtype} tensor has no digest; use torch.view_as_real(tensor)"
        )
    if tensor.is_meta:
        raise TypeError("a meta tensor has no content; load it first")
    if not has_memory(tensor):
        raise TypeError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory "
            "of its own; gather or materialize it first"
        )
    return tensor.resolve_neg()


def _nonfinite_reference(tensor: torch.Tensor, limit: int) -> int:
    if tensor.dtype in NAN_BYTES:
        return int(nan_bytes(tensor))
    width = tensor.element_size()
    magnitude = (1 << 8 * width - 1) - 1
    count = 0
    for leaf, _ in leaves(tensor, tensor.stride(), 0):
        bits = leaf.detach().view(INTEGERS[width])
        count += int(((bits & magnitude) >= limit).sum())
    return count


def _threads(num_threads: int) -> int:
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    return num_threads


def native_core() -> Any:
    """The native core; raises ImportError with a remedy if it does not load."""
    try:
        return importlib.import_module("vllm.inflight._C")
    except ImportError as error:
        raise ImportError(
            "the native core vllm/inflight/_C.abi3.so is missing or does not load "
            f"({error}); build it in the repository with: make build"
        ) from error
