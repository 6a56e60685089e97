"""GPU tensors that a trainer has exported with torch, as SGLang's clients send them.

Torch pickles such a tensor as the arguments of `rebuild_cuda_tensor` (see
`torch/multiprocessing/reductions.py`). The arguments have a handle for the allocation
that contains the tensor, an event that follows the work that produced it, and the
place of a counter. The trainer's torch frees the memory when that counter is 0.

Torch's own function is not called: it would open the handle in the process that reads
the pickle. Here the arguments are only checked. A rank maps the memory (handles.py),
and `release` counts down.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeGuard

import torch

from vllm.inflight.errors import Malformed
from vllm.inflight.transport.cuda_ipc.driver import HANDLE_BYTES
from vllm.inflight.transport.cuda_ipc.handles import Exports, host
from vllm.inflight.update import INT64, MAX_DIMENSIONS

NUM_ARGUMENTS = 15
"""The arguments of `rebuild_cuda_tensor`, in torch 2.5 to 2.13."""
VERSIONS = 2, 3
"""The first byte of a handle: 2 up to torch 2.12, 3 in torch 2.13. Handles of older
releases have no such byte. What follows is the same in all."""
WHOLE, EXPANDABLE = b"c", b"e"
"""The second byte: memory of cudaMalloc, or of an expandable segment."""
COUNTERS_PER_FILE = 10_000
"""`CUDA_IPC_REF_COUNTER_FILE_SIZE` of torch."""
COUNTERS_BYTES = 8 * COUNTERS_PER_FILE + 64
"""The size of a file with counters: torch puts 64 bytes of its own before them."""
COUNTERS = re.compile(rb"/torch_[0-9]{1,20}_[0-9]{1,20}_[0-9]{1,20}")
"""The name of a file with counters, as torch names its shared memory."""
SHARED_MEMORY = Path("/dev/shm")
PROCESS = "torch"
"""In place of the id of the exporting process, which such an export does not have."""


@dataclass(frozen=True, slots=True)
class Counter:
    """Counts the processes that still use an exported tensor."""

    name: str
    """Of the file in shared memory."""
    index: int

    @classmethod
    def of(cls, name: object, index: object) -> Self:
        """Check that it is a counter of this host, and of a process of this user.

        Raises:
            Malformed: it is not; the handle would be of somebody else's memory.

        """
        if not (
            isinstance(name, bytes)
            and COUNTERS.fullmatch(name)
            and _is_count(index, COUNTERS_PER_FILE)
        ):
            raise Malformed("an exported tensor has no counter of torch")
        text = name.decode()
        try:
            file = (SHARED_MEMORY / text[1:]).lstat()
        except OSError as error:
            raise Malformed(
                "the process of an exported tensor has ended, or is on another host or "
                f"in a container with another /dev/shm ({error}). Give both containers "
                "the same IPC namespace, or use a group"
            ) from None
        if file.st_uid != os.geteuid():
            raise Malformed(
                f"an exported tensor is of user {file.st_uid}, and this server runs as "
                f"user {os.geteuid()}: run both as one user, or use a group"
            )
        if not stat.S_ISREG(file.st_mode) or file.st_size != COUNTERS_BYTES:
            # Counting down in another file would change somebody's tensor.
            raise Malformed(
                f"{text} has {file.st_size} bytes, and torch's counters of exported "
                f"tensors have {COUNTERS_BYTES}"
            )
        return cls(text, index)


@dataclass(frozen=True, slots=True)
class TorchExport:
    """A contiguous tensor in GPU memory of another process."""

    handle: bytes
    """Of the allocation that contains it, for `cuIpcOpenMemHandle`."""
    start: int
    """Its first byte in the allocation."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    counter: Counter | None
    """None for a tensor without memory."""
    event: bytes | None
    """A handle of the event that follows the work on it; None if that is over."""

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Self:
        """Check the arguments of `rebuild_cuda_tensor`.

        Raises:
            Malformed: they are not those of a contiguous tensor in memory that can be
                mapped here.

        """
        if len(arguments) != NUM_ARGUMENTS:
            raise Malformed(
                f"an exported tensor has {len(arguments)} arguments, and torch 2.5 to "
                f"2.13 give {NUM_ARGUMENTS}"
            )
        _, shape, strides, offset, _, dtype, _, handle, size, start, *rest = arguments
        *_, event, has_event = rest
        if not (
            isinstance(dtype, torch.dtype)
            and _are_counts(shape)
            and _are_counts(strides)
            and len(shape) == len(strides) <= MAX_DIMENSIONS
            and _is_count(offset)
        ):
            raise Malformed("an exported tensor's dtype, shape or strides are invalid")
        if handle is None or size == 0:
            if 0 not in shape:
                raise Malformed("an exported tensor has elements, and no memory")
            return cls(bytes(HANDLE_BYTES), 0, dtype, tuple(shape), None, None)
        if not (_is_count(size) and _is_count(start)):
            raise Malformed("an exported tensor's place is invalid")
        if not _is_contiguous(shape, strides):
            raise Malformed(
                "an exported tensor is not contiguous; send tensor.contiguous(), or a "
                "flattened bucket"
            )
        itemsize = dtype.itemsize
        if (offset + math.prod(shape)) * itemsize > size:
            raise Malformed("an exported tensor is larger than its memory")
        return cls(
            _bare(handle),
            start + offset * itemsize,
            dtype,
            tuple(shape),
            counter_of(arguments),
            _event(event) if has_event else None,
        )

    @property
    def num_bytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cut(
        self, start: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> TorchExport:
        """The tensor in elements `start` to `end` of this one, which is flat.

        Raises:
            ValueError: the elements do not have the size of the tensor.

        """
        if not (_are_counts(shape) and _is_count(start) and _is_count(end)):
            raise ValueError("a shape or a place that is no count")
        if not isinstance(dtype, torch.dtype):
            raise ValueError("a dtype that is none")
        itemsize = self.dtype.itemsize
        part = replace(
            self, start=self.start + start * itemsize, dtype=dtype, shape=shape
        )
        if part.num_bytes != (end - start) * itemsize:
            raise ValueError(f"{part.num_bytes} bytes in {(end - start) * itemsize}")
        return part


def update_info(tensors: dict[str, TorchExport]) -> dict[str, Any]:
    """The `update_info` of these tensors, for `ExportedEngine`."""
    handles: dict[bytes, int] = {}
    places = []
    for tensor in tensors.values():
        if not tensor.num_bytes:
            places.append((0, 0))
        else:
            index = handles.setdefault(tensor.handle, len(handles))
            places.append((index, tensor.start))
    exports = Exports(
        host(),
        PROCESS,
        tuple(handles),
        tuple(places),
        (0,) * len(handles),
        tuple({t.event: None for t in tensors.values() if t.event is not None}),
    )
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "exports": exports.plain,
    }


def counter_of(arguments: Sequence[Any]) -> Counter | None:
    """The counter in the arguments of `rebuild_cuda_tensor`; None without memory.

    Raises:
        Malformed: it is no counter of this host and user.

    """
    if len(arguments) != NUM_ARGUMENTS or arguments[7] is None or arguments[8] == 0:
        return None
    return Counter.of(arguments[11], arguments[12])


def release(counters: Iterable[Counter]) -> None:
    """Tell the trainer that nobody here uses its tensors any more.

    A counter that is 0 stays so: the same pickle may have been sent again. Torch
    ignores a file that is gone, because its trainer has ended.
    """
    for counter in counters:
        # A torch without CUDA cannot count, and its engines read no GPU memory.
        with _counting, suppress(RuntimeError, OSError):
            if _value_of(counter) > 0:
                torch.UntypedStorage._release_ipc_counter_cuda(
                    counter.name.encode(), counter.index
                )


_counting = threading.Lock()


def _value_of(counter: Counter) -> int:
    with (SHARED_MEMORY / counter.name[1:]).open("rb") as file:
        file.seek(COUNTERS_BYTES - 8 * (COUNTERS_PER_FILE - counter.index))
        return int.from_bytes(file.read(8), "little", signed=True)


def _bare(handle: object) -> bytes:
    """The CUDA handle in a handle of torch."""
    if not isinstance(handle, bytes):
        raise Malformed("an exported tensor has no handle")
    if len(handle) == HANDLE_BYTES:
        return handle
    version, kind = handle[:1], handle[1:2]
    if kind == EXPANDABLE:
        raise Malformed(
            "an exported tensor is in an expandable segment, which cannot be mapped "
            "here; unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the "
            "trainer"
        )
    if len(handle) != HANDLE_BYTES + 2 or version[0] not in VERSIONS or kind != WHOLE:
        raise Malformed(
            f"an exported tensor has a handle of another form ({len(handle)} bytes, "
            f"which begin with {handle[:2]!r}); torch up to 2.13 is known here"
        )
    return handle[2:]


def _event(handle: object) -> bytes:
    if not isinstance(handle, bytes) or len(handle) != HANDLE_BYTES:
        raise Malformed("an exported tensor's event has no handle")
    return handle


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _is_count(value: object, limit: int = INT64) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < limit


def _are_counts(values: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple) and all(map(_is_count, values))
