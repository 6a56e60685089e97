"""Tensor files: open safetensors files, and the place of each tensor in them.

    length of the header (8 bytes, little-endian) | header (JSON) | tensors

This module checks a header entry by entry, by the rules of safetensors' own reader:
tensors follow one another in the file without holes, and each has the size that its
shape and dtype give. Safetensors' reader and `json.loads` hold the GIL for a whole
header. With the 91,000 tensors of a mixture of experts, no other thread would run for
tenths of a second.

Tensors are not read through safetensors either. It maps the file, and a thread that
waits for a disk in a page fault holds the GIL.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import torch

from vllm.inflight.errors import Malformed
from vllm.inflight.transport.buckets.tensor_list import TensorList
from vllm.inflight.update import INT64

MAX_HEADER_BYTES = 100_000_000
"""Largest header of a file; safetensors' own limit. It is checked before reading."""
LENGTH_BYTES = 8
"""The bytes of a header's length, which comes before the header."""
CHANGED = "it was written to while it was read, or renamed or removed"
BLANKS = re.compile(r"[ \t\n\r]*")
"""The blanks of JSON."""
METADATA = "__metadata__"
"""The only entry of a header that is not a tensor."""

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
"""Safetensors' name -> dtype. The dtypes of six bits have no counterpart in torch."""

UNREADABLE = ValueError, LookupError, TypeError, RecursionError
"""What reading an invalid header raises."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a tensor in its file."""

    file: Path
    descriptor: int
    offset: int
    """The tensor's first byte, counted from the beginning of the file."""

    def read(self, start: int, into: memoryview) -> None:
        """Fill `into` with the tensor's bytes from byte `start` on.

        Raises:
            Malformed: the file ends too early, or cannot be read.

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


class StoredTensors(Sequence[Stored]):
    """The places of many tensors; a `Stored` is made when it is needed.

    Python's garbage collector would scan a list of objects at every run.
    """

    def __init__(self) -> None:
        self._files: list[tuple[Path, int]] = []
        self._first: list[int] = []
        """The index of each file's first tensor."""
        self._offsets = array("q")

    def add(self, file: Path, descriptor: int, offsets: Sequence[int]) -> None:
        """Add a file, with the offsets of its tensors."""
        if offsets:
            self._files.append((file, descriptor))
            self._first.append(len(self._offsets))
            self._offsets.extend(offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, number: int) -> Stored: ...

    @overload
    def __getitem__(self, number: slice) -> list[Stored]: ...

    def __getitem__(self, number: int | slice) -> Stored | list[Stored]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        offset = self._offsets[number]
        number %= len(self)
        return Stored(*self._files[bisect_right(self._first, number) - 1], offset)


class TensorFiles:
    """Open safetensors files, as a context; the files must not change meanwhile.

    Args:
        files: the safetensors files, in the order in which they are read.
        rename: translates names in the files to names of the tensor list.

    Attributes:
        tensor_list: the tensors of all files, in file order.
        stored: the place of each tensor.

    Raises:
        Malformed: a file is not a whole safetensors file, or it had changed when the
            context ended; the message names the file.

    """

    def __init__(
        self, files: Sequence[Path], rename: Callable[[str], str] = str
    ) -> None:
        self.stored = StoredTensors()
        self._states: list[tuple[Path, int, State]] = []
        entries = Entries()
        with ExitStack() as opened:
            for file in files:
                try:
                    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                    opened.callback(os.close, descriptor)
                    self._states.append((file, descriptor, _state(descriptor)))
                    offsets = entries.read(file, descriptor)
                except OSError as error:
                    raise broken(file, error) from error
                self.stored.add(file, descriptor, offsets)
            self.tensor_list = TensorList(
                tuple(rename(name) for name in entries.names),
                tuple(entries.dtypes),
                tuple(entries.shapes),
            )
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._opened:
            for file, descriptor, state in self._states if kind is None else ():
                if _state(descriptor) != state:
                    raise broken(file, CHANGED)


State = tuple[int, int, int]


def _state(descriptor: int) -> State:
    """Values that differ after a file was written to.

    A writer may set `st_mtime` back, as `rsync -t` and `cp -p` do. No program can set
    `st_ctime`.
    """
    status = os.fstat(descriptor)
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size


class Entries:
    """The tensors in the headers of files, in file order.

    Attributes:
        names: the names in the files.
        dtypes: the dtype of each tensor.
        shapes: the shape of each tensor.

    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.shapes: list[tuple[int, ...]] = []

    def read(self, file: Path, descriptor: int) -> array[int]:
        """Add the tensors of an open file. Its path may name another file by now.

        Returns:
            the offset of each tensor, in bytes from the beginning of the file.

        Raises:
            Malformed: the file is not a whole safetensors file.
            OSError: the file cannot be read.

        """
        header, size = _header(file, descriptor)
        first, num_before = LENGTH_BYTES + len(header), len(self.names)
        begins, ends = array("q"), array("q")
        known: set[str] = set()
        try:
            for name, entry in _pairs(_without_filling(header).decode()):
                if name == METADATA:
                    _check_metadata(entry)
                    continue
                if name in known:
                    raise broken(file, f"{name!r:.300} is in it twice")
                known.add(name)
                begin, end = _place(entry)
                if not begin <= end <= size - first:
                    raise broken(file, f"{name!r:.300} does not lie in it")
                dtype, shape = _kind(entry)
                if dtype is None:
                    why = f"a dtype that torch lacks, {entry['dtype']:.300}"
                    raise broken(file, f"{name!r:.300} has {why}")
                if end - begin != math.prod(shape) * dtype.itemsize:
                    raise broken(file, f"{name!r:.300} does not fill its bytes")
                begins.append(first + begin)
                ends.append(first + end)
                self.names.append(name)
                self.dtypes.append(dtype)
                self.shapes.append(shape)
        except UNREADABLE as error:
            raise broken(file, error) from error
        if not _are_joined(first, begins, ends):
            order = sorted(range(len(begins)), key=lambda n: (begins[n], ends[n]))
            begins, ends = (array("q", [a[n] for n in order]) for a in (begins, ends))
            lists: tuple[list[Any], ...] = self.names, self.dtypes, self.shapes
            for each in lists:
                each[num_before:] = [each[num_before + number] for number in order]
        last = ends[-1] if ends else first
        if not _are_joined(first, begins, ends) or last != size:
            raise broken(file, "its tensors do not fill it one behind the other")
        return begins


def _header(file: Path, descriptor: int) -> tuple[bytes, int]:
    """The header of a file, and the size of the file in bytes."""
    size = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, LENGTH_BYTES, 0)
    length = int.from_bytes(prefix, "little")
    # The message has no length: these may be the first bytes of any secret file.
    if len(prefix) < LENGTH_BYTES or length > min(
        MAX_HEADER_BYTES, size - LENGTH_BYTES
    ):
        raise broken(file, "it does not begin with the length of a header")
    return os.pread(descriptor, length, LENGTH_BYTES), size


def _without_filling(header: bytes) -> bytes:
    """A header without the spaces behind its object.

    Writers leave room for a header and fill it up. To look at each of four million
    spaces would keep the interpreter's lock for 10 ms.
    """
    end = header.rfind(b"}") + 1
    is_filled = header[end:] == b" " * (len(header) - end)
    return header[:end] if is_filled else header


def _pairs(text: str) -> Iterator[tuple[str, Any]]:
    """Name and entry of each tensor; raises `ValueError` for an invalid header."""
    decode = json.JSONDecoder(parse_constant=_no_number).raw_decode

    def after_blanks(at: int) -> int:
        found = BLANKS.match(text, at)
        return at if found is None else found.end()

    def expect(character: str, at: int) -> int:
        """The index behind an expected character and the blanks after it."""
        if text[at : at + 1] != character:
            raise ValueError(f"at {at} there should be {character!r}")
        return after_blanks(at + 1)

    may_be_half = "\\ud" in text.lower()
    at = expect("{", 0)
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise ValueError(f"at {at} there should be a name")
        name, at = decode(text, at)
        at = expect(":", after_blanks(at))
        entry, at = decode(text, at)
        if may_be_half:  # half a surrogate pair is not a character
            json.dumps([name, entry], ensure_ascii=False).encode()
        yield name, entry
        at = after_blanks(at)
        if text[at : at + 1] != "}":
            at = expect(",", at)
            if text[at : at + 1] == "}":
                raise ValueError(f"at {at} there should be a name")
    if expect("}", at) != len(text):
        raise ValueError("there is more than one object")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _check_metadata(entry: object) -> None:
    """Raise `TypeError` unless the metadata has only strings."""
    if entry is None:
        return
    words = [*entry.items()] if isinstance(entry, dict) else [(None,)]
    if not all(isinstance(word, str) for pair in words for word in pair):
        raise TypeError("its metadata are no strings")


def _place(entry: object) -> tuple[int, int]:
    """The begin and the end of a tensor, in bytes after the header."""
    if not isinstance(entry, dict):
        raise TypeError("an entry is no object")
    begin, end = _counts(entry["data_offsets"])
    return begin, end


def _kind(entry: dict[str, Any]) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """The dtype of a tensor, None if torch lacks it; and the tensor's shape."""
    dtype, shape = DTYPES.get(entry["dtype"]), _counts(entry["shape"])
    if dtype is torch.float4_e2m1fn_x2:  # an element holds two numbers
        if not shape or shape[-1] % 2:
            raise ValueError("of numbers of 4 bits there are two in a byte")
        shape = (*shape[:-1], shape[-1] // 2)
    return dtype, shape


def _counts(numbers: object) -> tuple[int, ...]:
    counts = tuple(numbers) if isinstance(numbers, list) else (-1,)
    if not all(type(count) is int and 0 <= count < INT64 for count in counts):
        raise TypeError("there are no counts where they should be")
    return counts


def _are_joined(first: int, begins: array[int], ends: array[int]) -> bool:
    """Whether each tensor begins where the one before it ends."""
    return begins[:1] == array("q", [first])[: len(begins)] and begins[1:] == ends[:-1]


def broken(file: Path, why: object) -> Malformed:
    """The error for a file that is not a whole safetensors file."""
    return Malformed(f"{file} is not a whole safetensors file: {why}")
