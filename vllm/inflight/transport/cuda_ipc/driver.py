"""GPU memory of another process: exported there, mapped and read here.

The functions of CUDA's driver are called through ctypes, so neither a toolkit nor a
compiler is needed. A mapping keeps the memory alive, so the exporting process may die
while its memory is read. Copy engines carry copies from another GPU, which leaves all
processors to decoding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm.inflight.errors import EngineFault, TransferFault

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
"""`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`: the memory may belong to another GPU."""


NOT_READY = 600
"""`CUDA_ERROR_NOT_READY`: the work before an event has not ended."""


class _Handle(ctypes.Structure):
    """`CUipcMemHandle` or `CUipcEventHandle`, passed by value."""

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
    "cuIpcOpenEventHandle": [ctypes.POINTER(ctypes.c_void_p), _Handle],
    "cuEventQuery": [ctypes.c_void_p],
    "cuEventDestroy_v2": [ctypes.c_void_p],
    "cuMemcpyDtoDAsync_v2": [_ADDRESS, _ADDRESS, _SIZE, _STREAM],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of memory in the address space of a process."""

    address: int
    num_bytes: int


class SharedMemory(Protocol):
    """How a process exports device memory, and reads the memory of another process."""

    device_type: str
    """The type of devices whose memory can be exported, as torch names it."""

    def settle(self, devices: Iterable[torch.device]) -> None:
        """Wait for all work that this process has enqueued on these devices."""
        ...

    def gpu(self, device: torch.device) -> str:
        """A name of the GPU that all processes of the host have for it."""
        ...

    def at(self, device: torch.device) -> AbstractContextManager[object]:
        """A context in which addresses are addresses of `device`."""
        ...

    def extent(self, address: int) -> Extent:
        """The allocation that contains `address`."""
        ...

    def export(self, address: int) -> bytes:
        """A handle for the allocation that begins at `address`."""
        ...

    def map(self, handle: bytes) -> Extent:
        """Map the memory of a handle, so that this process can read it."""
        ...

    def unmap(self, address: int) -> None:
        """Remove a mapping; no copy of it may be under way."""
        ...

    def event(self, handle: bytes) -> AbstractContextManager[Callable[[], bool]]:
        """A context that tells whether an event of another process has passed."""
        ...

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy on a stream."""
        ...


class CudaMemory:
    """Implements `SharedMemory`, for the calling thread's current device.

    Raises:
        EngineFault: there is no CUDA driver.
        TransferFault: a call of the driver failed; the message names call and code.

    """

    device_type = "cuda"

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            # This one keeps the GIL: getting it back takes longer than the call.
            self._library_with_gil = ctypes.PyDLL(LIBRARY)
        except OSError as error:
            raise EngineFault(f"inflight_ipc needs a GPU: {error}") from error
        for name, arguments in _ARGUMENTS.items():
            for library in (self._library, self._library_with_gil):
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int

    def settle(self, devices: Iterable[torch.device]) -> None:
        """Wait for all streams of these devices."""
        for device in devices:
            # The stream that wrote a tensor is not known here. An optimizer's thread
            # has a current stream of its own, and may gather on yet another.
            torch.cuda.synchronize(device)

    def gpu(self, device: torch.device) -> str:
        """The UUID of a GPU; its number may differ from process to process."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def at(self, device: torch.device) -> AbstractContextManager[object]:
        """Make `device` the current device of the calling thread."""
        return torch.cuda.device(device)

    def extent(self, address: int) -> Extent:
        """The allocation that contains `address`."""
        base, size = _ADDRESS(), _SIZE()
        self._call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address
        )
        return Extent(base.value, size.value)

    def export(self, address: int) -> bytes:
        """A handle for the allocation that begins at `address`.

        Memory that is freed and allocated again gets another handle.
        """
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def map(self, handle: bytes) -> Extent:
        """Map the memory of another process's handle for the current device."""
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
        """Remove a mapping."""
        self._call("cuIpcCloseMemHandle", address)

    @contextmanager
    def event(self, handle: bytes) -> Iterator[Callable[[], bool]]:
        """A context with a function that tells whether an event has passed.

        Args:
            handle: of an event that another process has recorded.

        """
        event = ctypes.c_void_p()
        self._call(
            "cuIpcOpenEventHandle",
            ctypes.byref(event),
            _Handle.from_buffer_copy(handle),
        )

        def has_passed() -> bool:
            code = self._library.cuEventQuery(event)
            if code != NOT_READY:
                self._check_code("cuEventQuery", code)
            return bool(code != NOT_READY)

        try:
            yield has_passed
        finally:
            self._library.cuEventDestroy_v2(event)

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy between two addresses that this device can reach."""
        self._check_code(
            "cuMemcpyDtoDAsync_v2",
            self._library_with_gil.cuMemcpyDtoDAsync_v2(
                target, source, num_bytes, stream
            ),
        )

    def _call(self, name: str, *arguments: object) -> None:
        # A call of CUDA's runtime gives this thread the context that the driver needs.
        torch.cuda.current_stream().query()
        self._check_code(name, getattr(self._library, name)(*arguments))

    def _check_code(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise TransferFault(f"{name}: {(text.value or b'?').decode()} ({code})")
