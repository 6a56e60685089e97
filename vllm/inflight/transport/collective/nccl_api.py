"""The dozen functions of libnccl that a wire needs, and their two structs.

By ctypes on the very library that torch has loaded, so no toolkit and no compiler is
needed. The layouts are those of `nccl.h`, whose structs only ever grow at the end.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

from vllm.inflight.errors import EngineFault, TransferFault

LIBRARY = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
OLDEST = 21800
"""2.18, the first whose config has `splitShare`."""

MAGIC = 0xCAFEBEEF
UNDEFINED = -(2**31)


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`: 128 bytes, passed by value."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """`ncclConfig_t` up to `trafficClass`, which is 48 bytes without padding.

    NCCL copies the first `size` bytes over its own defaults; what it knows beyond
    them stays undefined. 2.18, whose struct ends before `trafficClass`, pads it to the
    same 48 bytes.
    """

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
    ]


def config(version: int, *, max_ctas: int | None = None) -> Config:
    """A config of a communicator that never blocks its caller.

    Args:
        version: of the library.
        max_ctas: most thread blocks it may take, the same on all ranks; None for a
            group in which another rank has left that to NCCL.

    """
    bounded = max_ctas is not None
    return Config(
        size=ctypes.sizeof(Config),
        magic=MAGIC,
        version=version,
        blocking=0,
        cgaClusterSize=UNDEFINED,
        minCTAs=1 if bounded else UNDEFINED,
        maxCTAs=max_ctas if bounded else UNDEFINED,
        netName=None,
        splitShare=UNDEFINED,
        trafficClass=UNDEFINED,
    )


_COMM, _STREAM, _POINTER = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(_COMM),
        ctypes.c_int,
        UniqueId,
        ctypes.c_int,
        ctypes.POINTER(Config),
    ],
    "ncclCommGetAsyncError": [_COMM, ctypes.POINTER(ctypes.c_int)],
    "ncclBroadcast": [
        _POINTER,
        _POINTER,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        _COMM,
        _STREAM,
    ],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclCommFinalize": [_COMM],
    "ncclCommDestroy": [_COMM],
    "ncclCommAbort": [_COMM],
}
"""All return `ncclResult_t`."""


class Library:
    """The loaded library; every call may answer that it is still in progress."""

    def __init__(self) -> None:
        library = _load()
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        for name in ("ncclGetErrorString", "ncclGetLastError"):
            getattr(library, name).restype = ctypes.c_char_p
        library.ncclGetErrorString.argtypes = [ctypes.c_int]
        library.ncclGetLastError.argtypes = [_COMM]
        self._library = library
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version = number.value
        if self.version < OLDEST:
            raise EngineFault(f"NCCL {self.version} is older than {OLDEST}")

    def call(self, name: str, *arguments: Any) -> bool:
        """Whether it is done at once; raises `TransferFault` if it failed."""
        return self.judge(name, getattr(self._library, name)(*arguments))

    def unique_id(self) -> bytes:
        """A new name for a communicator; 128 bytes."""
        unique = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def state(self, comm: ctypes.c_void_p) -> bool:
        """Whether `comm` has done what it was given; raises if it failed."""
        state = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return self.judge("the communicator", state.value)

    def judge(self, what: str, result: int) -> bool:
        """Read an `ncclResult_t`."""
        if result not in (SUCCESS, IN_PROGRESS):
            text = self._library.ncclGetErrorString(result).decode()
            last = (self._library.ncclGetLastError(None) or b"").decode().strip()
            raise TransferFault(
                f"NCCL: {what}: {text}" + (f" ({last})" if last else "")
            )
        return result == SUCCESS


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)  # by its name: the one already loaded
    except OSError:
        spec = importlib.util.find_spec("nvidia.nccl") if _has("nvidia") else None
        for folder in spec.submodule_search_locations or () if spec else ():
            file = Path(folder) / "lib" / LIBRARY
            if file.is_file():
                return ctypes.CDLL(str(file))
    raise EngineFault(f"there is no {LIBRARY} here; inflight_nccl needs torch for CUDA")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
