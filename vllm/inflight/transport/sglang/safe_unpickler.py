"""SGLang's pickled tensors, read by an unpickler that allows a dozen names.

A pickle names functions and calls them, and sets attributes of the objects it has made.
So the names of torch's functions that build tensors stand for functions of ours, which
only record the arguments. A pickle never reaches a tensor or a storage of torch.
Tensors are made after the pickle was read, of bytes that are in the pickle. A tensor in
the GPU memory of the sender becomes a `TorchExport`, which a rank opens.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch.storage import TypedStorage

from vllm.inflight.errors import Malformed
from vllm.inflight.transport.cuda_ipc.torch_exports import (
    Counter,
    TorchExport,
    counter_of,
)
from vllm.inflight.update import INT64, MAX_DIMENSIONS

PROTOCOLS = tuple(bytes([0x80, version]) for version in range(2, 6))
METADATA = "FlattenedTensorMetadata"
ZIP = b"PK"
"""The first bytes of torch's current file format. A pickled storage has the older
format."""
MEMOS = ("PUT", "BINPUT", "LONG_BINPUT")
"""Opcodes that store an object in the unpickler's memo."""
MAX_EXPANSION = 4
"""Most bytes of all tensors, as a multiple of the pickle's size. It is above 1 because
tensors may share memory."""


def is_pickle(first: bytes, last: bytes, size: int) -> bool:
    """Whether a file is a pickle and not a safetensors file.

    Args:
        first: the first 8 bytes of the file.
        last: the last byte of the file.
        size: the size of the file, in bytes.

    """
    if first[:2] not in PROTOCOLS or last != b".":
        return False
    # A safetensors file begins with the length of its header, which may have the same
    # first bytes. A length that fits into the file is smaller than a pickle's first
    # 8 bytes read as a number.
    return int.from_bytes(first, "little") > size - 8


class _Placeholder:
    """An object that a pickle may hold but not change."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise Malformed("the pickle sets attributes of a tensor")


class _Function(_Placeholder):
    """Stands for a function. There is a new one each time that a pickle names it."""

    __slots__ = ("_record",)

    def __init__(self, record: Callable[..., Any]) -> None:
        self._record = record

    def __call__(self, *arguments: object) -> Any:
        return self._record(*arguments)


class _Failure(_Placeholder):
    """Stands for an error that the sender reports."""

    __slots__ = ("text",)
    __match_args__ = ("text",)

    def __init__(self, *texts: object) -> None:
        self.text = " ".join(text for text in texts if isinstance(text, str))[:1000]


class _Storage(_Placeholder):
    """The bytes of some tensors, and the dtype of their elements."""

    __slots__ = "data", "dtype"
    data: torch.Tensor
    """uint8, one dimension. It owns its memory and cannot grow."""
    dtype: torch.dtype


class _View(_Placeholder):
    """A tensor within a storage."""

    __slots__ = "offset", "shape", "storage", "strides"
    storage: _Storage
    offset: int
    """In elements of the storage's dtype, like the strides."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.storage.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """The tensor as a torch tensor."""
        typed = torch.empty(0, dtype=self.storage.dtype)
        memory = self.storage.data.untyped_storage()
        return typed.set_(memory, self.offset, self.shape, self.strides)


class _Part(_Placeholder):
    """Stands for SGLang's record of a tensor in a bucket."""

    __slots__ = ("facts",)
    facts: dict[str, Any]

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise Malformed("the record of a part of a bucket is no object")
        self.facts = state


class _Exported(_Placeholder):
    """A tensor in GPU memory of the sender."""

    __slots__ = ("export",)
    export: TorchExport
    num_bytes = 0
    """Of this process's memory."""

    def tensor(self) -> TorchExport:
        """Where the tensor is."""
        return self.export


def tensors(data: bytes, where: str, counters: list[Counter] | None = None) -> Any:
    """The list of (name, tensor), or the bucket, in a pickle; see request_tensors.py.

    A tensor is a `torch.Tensor`, or a `TorchExport` if it is in GPU memory. The
    counters of GPU memory are added to `counters`, also if the pickle is rejected.

    Raises:
        Malformed: the pickle names or holds something that is not allowed.

    """
    with _named(where):
        found = _to_tensors(_load(data, counters), MAX_EXPANSION * len(data))
    if found is None:
        raise Malformed(f"{where} holds no list of (name, tensor) and no bucket")
    return found


def message(
    data: bytes, where: str, counters: list[Counter]
) -> TorchExport | list[Any] | str | None:
    """A message of a checkpoint-engine; see checkpoint_engine.py.

    The counter of a buffer is added to `counters`, also if the buffer is rejected.

    Returns:
        the sender's buffer; or a list of the tensors in it; or what has failed, as
        text; or None at the end.

    Raises:
        Malformed: the pickle names or holds something that is not allowed.

    """
    with _named(where):
        match _load(data):
            case (_Function(), tuple(arguments)):
                if (counter := counter_of(arguments)) is not None:
                    counters.append(counter)
                return TorchExport.of(arguments)
            case _Failure(text):
                return text
            case None | list() as found:
                return found
    raise Malformed(f"{where} holds no buffer, no list of tensors and no end")


@contextmanager
def _named(where: str) -> Iterator[None]:
    """A context in which every failure is a `Malformed` that names `where`."""
    try:
        yield
    except Malformed as error:
        raise Malformed(f"{where}: {error.message}") from None
    except Exception as error:
        raise Malformed(f"{where} cannot be read: {error}") from None


def _load(data: bytes, counters: list[Counter] | None = None) -> Any:
    for opcode, place, _ in pickletools.genops(data):
        # The memo is a list that is as long as its highest index.
        if opcode.name in MEMOS and int(place or 0) > len(data):
            raise Malformed(f"the pickle has no {place} things to remember")
    return _Tensors(data, [] if counters is None else counters).load()


def _to_tensors(found: object, most: int) -> Any:
    """The tensors of a pickle; None if it holds none, or more than `most` bytes."""
    if isinstance(found, dict):
        parts = found.get("metadata")
        bucket = found.get("flattened_tensor")
        if (
            isinstance(parts, list)
            and all(type(part) is _Part for part in parts)
            and isinstance(bucket, _View | _Exported)
            and bucket.num_bytes <= most
        ):
            return {
                "flattened_tensor": bucket.tensor(),
                "metadata": [part.facts for part in parts],
            }
    if (
        isinstance(found, list | tuple)
        and all(map(_is_pair, found))
        and sum(view.num_bytes for _, view in found) <= most
    ):
        return [(name, view.tensor()) for name, view in found]
    return None


def _is_pair(item: object) -> bool:
    return (
        isinstance(item, list | tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], _View | _Exported)
    )


def _storage(data: object) -> _Storage:
    """Stands for `torch.storage._load_from_bytes`."""
    if type(data) is not bytes or data.startswith(ZIP):
        raise Malformed("a tensor's bytes are not those of a pickled storage")
    # Torch's own function would unpickle any object inside. It would also allocate on
    # the trainer's GPU device, which does not exist here or belongs to a rank.
    found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if type(found) is not TypedStorage:
        raise Malformed("the pickle has something else where a tensor's bytes belong")
    memory = found._untyped_storage
    if memory.nbytes() > len(data):
        raise Malformed("a storage is larger than the bytes that came with it")
    made = _Storage()
    # Memory that numpy owns has a fixed size. Torch would grow its own storage for a
    # larger tensor, which would expose old memory of this process.
    whole = torch.empty(0, dtype=torch.uint8).set_(memory)
    made.data, made.dtype = torch.from_numpy(whole.numpy()), found.dtype
    return made


def _view(
    storage: object, offset: object, shape: Any, strides: Any, *_: object
) -> _View:
    """Stands for `torch._utils._rebuild_tensor_v2`; more arguments are autograd's.

    Raises:
        Malformed: the tensor is not within its storage.

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
    # The end of the last element; an empty tensor has no elements.
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    end = offset + last + 1 if 0 not in shape else offset
    if end * storage.dtype.itemsize > storage.data.nbytes:
        raise Malformed("a tensor is larger than the bytes that came with it")
    made = _View()
    made.storage, made.offset = storage, offset
    made.shape, made.strides = tuple(shape), tuple(strides)
    return made


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < INT64


def _parameter(data: object, *_: object) -> _View | _Exported:
    """Stands for `torch._utils._rebuild_parameter`."""
    if not isinstance(data, _View | _Exported):
        raise Malformed("a parameter is made of something else than a tensor")
    return data


ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("builtins", "RuntimeError"): _Failure,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): OrderedDict,
}
"""The names that a pickle may use, besides dtypes and SGLang's record of a part."""


ARGUMENTS = (
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.storage", "UntypedStorage"),
    ("torch.storage", "TypedStorage"),
)
"""Classes that an exported tensor names as arguments. They cannot be called here."""
REBUILD = "_rebuild_cuda_tensor_modified"
"""SGLang's function for an exported tensor, which names the GPU by its UUID."""


OF_TORCH = "torch.multiprocessing.reductions", "rebuild_cuda_tensor"
DTYPES = {name: d for name, d in vars(torch).items() if isinstance(d, torch.dtype)}


class _Tensors(pickle.Unpickler):
    def __init__(self, data: bytes, counters: list[Counter]) -> None:
        super().__init__(io.BytesIO(data))
        self._counters = counters

    def _exported(self, *arguments: object) -> _Exported:
        """Stands for torch's function that rebuilds a tensor in GPU memory."""
        if (counter := counter_of(arguments)) is not None:
            self._counters.append(counter)
        made = _Exported()
        made.export = TorchExport.of(arguments)
        return made

    def find_class(self, module: str, name: str) -> Any:
        if (found := ALLOWED.get((module, name))) is not None:
            return found if isinstance(found, type) else _Function(found)
        if (module, name) in ARGUMENTS:
            return _Placeholder()
        if module.startswith("sglang.srt.") and name == METADATA:
            return _Part
        is_sglangs = module.startswith("sglang.srt.") and name == REBUILD
        if is_sglangs or (module, name) == OF_TORCH:
            return _Function(self._exported)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise Malformed(f"the pickle names {module}.{name}, which is not allowed")
