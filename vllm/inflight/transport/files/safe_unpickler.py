"""SGLang's pickled tensors, read by an unpickler that knows a dozen names.

A pickle names functions and calls them, and sets attributes of what it has made. So the
names of torch's own functions that put tensors together stand for functions of ours,
which note what is asked for. No pickle ever has a tensor or a storage of torch's in its
hands. Tensors are made when it has been read, of bytes that came with it. Handles of
memory of another process are not among them: a rank, and not the server, would have to
open them.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

import torch
from torch.storage import TypedStorage

from vllm.inflight.errors import Malformed
from vllm.inflight.update import INT64, MAX_DIMENSIONS

PROTOCOLS = tuple(bytes([0x80, version]) for version in range(2, 6))
METADATA = "FlattenedTensorMetadata"
ZIP = b"PK"
"""How a file begins that torch writes today; a pickled storage is one of the older
kind."""
MEMOS = ("PUT", "BINPUT", "LONG_BINPUT")
MOST_TIMES = 4
"""As many bytes may tensors have as their pickle, for some share their memory."""


def is_pickle(first: bytes, last: bytes, size: int) -> bool:
    """Whether bytes are a pickle, and no safetensors file.

    Args:
        first: the first 8 of them.
        last: the last one.
        size: how many there are.

    """
    if first[:2] not in PROTOCOLS or last != b".":
        return False
    # Such a file begins with the length of its header, which may look the same. To a
    # pickle's first bytes a length can belong only if they are followed by zeros.
    return int.from_bytes(first, "little") > size - 8


class _Made:
    """What a pickle has made; it may hold it, and cannot change it."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise Malformed("the pickle changes what it has made of tensors")


class _Storage(_Made):
    """The bytes of some tensors, and the dtype that they are counted in."""

    __slots__ = "data", "dtype"
    data: torch.Tensor
    """uint8, of one dimension; it owns its memory, and cannot grow."""
    dtype: torch.dtype


class _View(_Made):
    """A tensor that lies within a storage."""

    __slots__ = "offset", "shape", "storage", "strides"
    storage: _Storage
    offset: int
    """In numbers of the storage's dtype, as the strides."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.storage.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """As torch has it."""
        typed = torch.empty(0, dtype=self.storage.dtype)
        memory = self.storage.data.untyped_storage()
        return typed.set_(memory, self.offset, self.shape, self.strides)


def tensors(data: bytes, where: str) -> Any:
    """The list of pairs, or the bucket, in a pickle; as request_tensors.py wants them.

    Raises:
        Malformed: it names something else than tensors, or holds something else.

    """
    try:
        for opcode, place, _ in pickletools.genops(data):
            # The memo is a list in memory, as long as its last place.
            if opcode.name in MEMOS and int(place or 0) > len(data):
                raise Malformed(f"the pickle has no {place} things to remember")
        found = _made(_Tensors(io.BytesIO(data)).load(), MOST_TIMES * len(data))
    except Malformed as error:
        raise Malformed(f"{where}: {error.message}") from None
    except Exception as error:
        raise Malformed(f"{where} cannot be read: {error}") from None
    if found is None:
        raise Malformed(f"{where} holds no list of (name, tensor) and no bucket")
    return found


def _made(found: Any, most: int) -> Any:
    """The tensors of a pickle, of at most `most` bytes; None if it holds no such."""
    if isinstance(found, dict):
        parts = found.get("metadata")
        bucket = found.get("flattened_tensor")
        if (
            isinstance(parts, list)
            and all(type(part).__name__ == METADATA for part in parts)
            and type(bucket) is _View
            and bucket.num_bytes <= most
        ):
            return {
                "flattened_tensor": bucket.tensor(),
                "metadata": [vars(part) for part in parts],
            }
    if (
        isinstance(found, list | tuple)
        and all(map(_is_pair, found))
        and sum(view.num_bytes for _, view in found) <= most
    ):
        return [(name, view.tensor()) for name, view in found]
    return None


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and type(item[1]) is _View
    )


def _storage(data: Any) -> _Storage:
    """In the place of `torch.storage._load_from_bytes`."""
    if type(data) is not bytes or data.startswith(ZIP):
        raise Malformed("a tensor's bytes are not those of a pickled storage")
    # What torch itself calls here would unpickle anything that lies inside, and would
    # take memory of the trainer's GPU here, which is a rank's or is not there.
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if type(found) is not TypedStorage:
        raise Malformed("the pickle has something else where a tensor's bytes belong")
    memory = found._untyped_storage
    if memory.nbytes() > len(data):
        raise Malformed("a storage is larger than the bytes that came with it")
    made = _Storage()
    # As numpy's, of a fixed size: under a tensor that is larger torch would let it
    # grow, over whatever this process had in that memory before.
    whole = torch.empty(0, dtype=torch.uint8).set_(memory)
    made.data, made.dtype = torch.from_numpy(whole.numpy()), found.dtype
    return made


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *_: object) -> _View:
    """In the place of `torch._utils._rebuild_tensor_v2`; what is behind is autograd's.

    Raises:
        Malformed: the tensor does not lie within its storage.

    """
    if type(storage) is not _Storage:
        raise Malformed("a tensor's storage is something else")
    lists = shape, strides
    if not (
        _is_count(offset)
        and all(isinstance(each, tuple) for each in lists)
        and len(shape) == len(strides) <= MAX_DIMENSIONS
        and all(_is_count(number) for each in lists for number in each)
    ):
        raise Malformed("a tensor's offset, shape or strides are no counts")
    # Of the last number, and one more; what is empty has none.
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    end = offset + last + 1 if 0 not in shape else offset
    if end * storage.dtype.itemsize > storage.data.nbytes:
        raise Malformed("a tensor is larger than the bytes that came with it")
    made = _View()
    made.storage, made.offset = storage, offset
    made.shape, made.strides = tuple(shape), tuple(strides)
    return made


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < INT64


def _parameter(data: Any, *_: object) -> _View:
    """In the place of `torch._utils._rebuild_parameter`."""
    if type(data) is not _View:
        raise Malformed("a parameter is made of something else than a tensor")
    return data


ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
}
"""All that a pickle may name, besides dtypes and SGLang's record of a part."""


class _Tensors(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # New objects, since a pickle may change whatever it is handed.
        if (found := ALLOWED.get((module, name))) is not None:
            return found if isinstance(found, type) else lambda *args: found(*args)
        if module.startswith("sglang.srt.") and name == METADATA:
            return type(METADATA, (), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise Malformed(f"the pickle names {module}.{name}, which is not allowed")
