"""Tensor files: safetensors that are open, and where in them each tensor lies.

What such a file says of itself is judged by safetensors' own reader, which then tells
names, dtypes and shapes. The header is read here first, for the offsets alone:

    length of the header (8 bytes, little-endian) | header (JSON) | tensors

No tensor is asked for. safetensors maps it and touches it, and who waits for a disk in
a page fault holds Python's lock meanwhile: nothing else of the process goes on.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

from vllm.inflight.errors import Malformed
from vllm.inflight.wire.announcement import Announcement

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""By safetensors' names; those of six bits have no counterpart in torch."""

UNREADABLE = (
    struct.error,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
"""What a header raises that is none."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where in its file a tensor begins."""

    file: Path
    descriptor: int
    offset: int
    """In bytes, from the beginning of the file."""

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the tensor's bytes from `start` on.

        Raises:
            Malformed: the file ends before that, or cannot be read.

        """
        at = self.offset + start
        while into:
            try:
                num_read = os.preadv(self.descriptor, [into], at)
            except OSError as error:
                raise broken(self.file, error) from error
            if not num_read:
                raise broken(self.file, f"it ends at {at}, with more to come")
            into, at = into[num_read:], at + num_read


class Entry(NamedTuple):
    """What a file says of a tensor."""

    offset: int
    """In bytes, from the beginning of the file."""
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFiles:
    """Files that are open until the `with` around them ends, and must not change.

    Args:
        files: safetensors, in the order in which they are read.
        rename: from the names in them to those that are announced.

    Attributes:
        announced: their tensors, those of a file as they lie in it.
        stored: where each of them begins.

    Raises:
        Malformed: one of them is not a whole safetensors file, or, at the end, not the
            one any more that was opened; the message names it.

    """

    def __init__(
        self, files: Sequence[Path], rename: Callable[[str], str] = str
    ) -> None:
        self.stored: list[Stored] = []
        self._states: list[tuple[Path, int, tuple[int, int]]] = []
        entries: list[Entry] = []
        with ExitStack() as opened:
            for file in files:
                try:
                    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, descriptor)
                    self._states.append((file, descriptor, _state(descriptor)))
                    found = sorted(_entries(file, descriptor))
                except (SafetensorError, OSError) as error:
                    raise broken(file, error) from error
                self.stored += (Stored(file, descriptor, e.offset) for e in found)
                entries += found
            self.announced = Announcement(
                tuple(rename(entry.name) for entry in entries),
                tuple(entry.dtype for entry in entries),
                tuple(entry.shape for entry in entries),
            )
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._opened:
            for file, descriptor, state in self._states if kind is None else ():
                if _state(descriptor) != state:
                    raise broken(file, "it was written to while it was read")


def _state(descriptor: int) -> tuple[int, int]:
    """What is another after a file was written to."""
    status = os.fstat(descriptor)
    return status.st_mtime_ns, status.st_size


def _entries(file: Path, descriptor: int) -> Iterator[Entry]:
    """What there is, no byte of which is read here.

    Of the file that is open, whatever has its path by now.
    """
    offsets = _offsets(file, descriptor)
    with safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            told = opened.get_slice(name)
            dtype, shape = DTYPES.get(told.get_dtype()), tuple(told.get_shape())
            if dtype is None:
                why = f"{name!r:.300} has a dtype that torch lacks, {told.get_dtype()}"
                raise broken(file, why)
            if dtype is torch.float4_e2m1fn_x2:  # two numbers in each
                shape = (*shape[:-1], shape[-1] // 2)
            begin, end = offsets.get(name, (0, -1))
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise broken(file, f"{name!r:.300} has changed while it was opened")
            yield Entry(begin, name, dtype, shape)


def _offsets(file: Path, descriptor: int) -> dict[str, tuple[int, int]]:
    """Where each tensor begins and ends, in bytes from the beginning of the file.

    Whether they fit each other, and their tensors, is judged by safetensors after this.
    """
    try:
        size = os.fstat(descriptor).st_size
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        first = 8 + length
        if first > size:
            raise broken(file, f"a header of {length} bytes is longer than the file")
        offsets: dict[str, tuple[int, int]] = {}
        for name, entry in json.loads(os.pread(descriptor, length, 8)).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - first:
                raise broken(file, f"{name!r:.300} does not lie in it")
            offsets[name] = first + begin, first + end
    except UNREADABLE as error:
        raise broken(file, error) from error
    return offsets


def broken(file: Path, why: object) -> Malformed:
    """The error of a file that cannot be read to its end."""
    return Malformed(f"{file} is not a whole safetensors file: {why}")
