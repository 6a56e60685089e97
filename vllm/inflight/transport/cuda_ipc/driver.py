"""Memory of another process's GPU: exported there, mapped and read here.

CUDA's interprocess memory by the driver's own functions, through ctypes, so that no
toolkit and no compiler is needed. A mapping keeps the memory alive: a process that
exported it may die while it is being read. What is copied from another GPU is carried
by copy engines, which leave every processor to decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vllm.inflight.errors import EngineFault, TransferFault

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the memory may be another GPU's."""


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


_ADDRESS, _SIZE, _STREAM = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_ARGUMENTS = {
    "cuMemGetAddressRange_v2": [
        ctypes.POINTER(_ADDRESS),
        ctypes.POINTER(_SIZE),
        _ADDRESS,
    ],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _ADDRESS],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_ADDRESS), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_ADDRESS],
    "cuMemcpyDtoDAsync_v2": [_ADDRESS, _ADDRESS, _SIZE, _STREAM],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of memory as its own process sees it."""

    address: int
    num_bytes: int


class SharedMemory(Protocol):
    """What one process can do with the memory of another's."""

    device_type: str
    """Of the tensors it can lend, as torch names it."""

    def settle(self, devices: Iterable[torch.device]) -> None:
        """Wait until all that this process computes on them by now is there."""
        ...

    def at(self, device: torch.device) -> AbstractContextManager[Any]:
        """Let addresses be those of `device`."""
        ...

    def extent(self, address: int) -> Extent:
        """The allocation that holds `address`."""
        ...

    def export(self, address: int) -> bytes:
        """A handle of the allocation that begins at `address`."""
        ...

    def map(self, handle: bytes) -> Extent:
        """Let this process read what a handle stands for."""
        ...

    def unmap(self, address: int) -> None:
        """Read it no more; nothing may be under way."""
        ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy on a stream."""
        ...


class CudaMemory:
    """Implements `SharedMemory`, for the current device of the calling thread.

    Raises:
        EngineFault: there is no driver here.
        TransferFault: a call of it failed; the message names call and code.

    """

    device_type = "cuda"

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            # Keeps the interpreter, which to get back takes longer than the call.
            self._at_once = ctypes.PyDLL(LIBRARY)
        except OSError as error:
            raise EngineFault(f"inflight_ipc needs a GPU: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            for library in (self._library, self._at_once):
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int

    def settle(self, devices: Iterable[torch.device]) -> None:
        """Wait for all streams of these devices."""
        for device in devices:
            # Which stream wrote a tensor is not known here: an optimizer's thread has a
            # current stream of its own, and may gather on another one besides.
            torch.cuda.synchronize(device)

    def at(self, device: torch.device) -> AbstractContextManager[Any]:
        """Make it the current device of the calling thread."""
        return torch.cuda.device(device)

    def extent(self, address: int) -> Extent:
        """The allocation that holds `address`."""
        base, size = _ADDRESS(), _SIZE()
        self._call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address
        )
        return Extent(base.value, size.value)

    def export(self, address: int) -> bytes:
        """A handle of the allocation that begins at `address`; memory that is freed
        and allocated again has another."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def map(self, handle: bytes) -> Extent:
        """Let the current device read the memory of a handle of another process."""
        address = _ADDRESS()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            LAZY_PEER_ACCESS,
        )
        try:
            return self.extent(address.value)
        except BaseException:
            self._library.cuIpcCloseMemHandle(address.value)
            raise

    def unmap(self, address: int) -> None:
        """The end of a mapping."""
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy between two places that this device can reach."""
        self._judge(
            "cuMemcpyDtoDAsync_v2",
            self._at_once.cuMemcpyDtoDAsync_v2(target, source, num_bytes, stream),
        )

    def _call(self, name: str, *arguments: Any) -> None:
        # A call of the runtime's gives this thread the context the driver wants.
        torch.cuda.current_stream().query()
        self._judge(name, getattr(self._library, name)(*arguments))

    def _judge(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise TransferFault(f"{name}: {(text.value or b'?').decode()} ({code})")
