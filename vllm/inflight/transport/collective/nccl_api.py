"""The dozen functions of libnccl that a group needs, and two structs.

They are called by ctypes in the library that torch has loaded, so neither a toolkit nor
a compiler is needed. The struct layouts are those of `nccl.h`, where structs only grow
at the end.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from vllm.inflight.errors import EngineFault, TransferFault

LIBRARY = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
MIN_VERSION = 21800
"""NCCL 2.18, the first version whose config has `splitShare`."""

MAGIC = 0xCAFEBEEF
UNDEFINED = -(2**31)


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`: 128 bytes, passed by value."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """`ncclConfig_t` up to `trafficClass`: 48 bytes without padding.

    NCCL copies the first `size` bytes over its own defaults. Later fields keep their
    defaults. In 2.18 the struct ends before `trafficClass`, and is padded to the same
    48 bytes.
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
    """The config of a non-blocking communicator.

    Args:
        version: the version of the library.
        max_ctas: most thread blocks that the communicator may take; must be equal on
            all ranks. None leaves it to NCCL, as ranks that torch opens do.

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
SIGNATURES: dict[str, list[type]] = {
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
"""Function -> types of its arguments; all functions return `ncclResult_t`."""


class Library:
    """The loaded library. Every call may return that it is still in progress.

    Raises:
        EngineFault: there is no libnccl, or it is too old.

    """

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
        if self.version < MIN_VERSION:
            raise EngineFault(f"NCCL {self.version} is older than {MIN_VERSION}")

    def call(self, name: str, *arguments: object) -> bool:
        """Call a function; False if it is in progress. Raises `TransferFault`."""
        return self.check_result(name, getattr(self._library, name)(*arguments))

    def unique_id(self) -> bytes:
        """A new id for a communicator; 128 bytes."""
        unique = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def state(self, comm: ctypes.c_void_p) -> bool:
        """Whether `comm` has no call in progress; raises `TransferFault`."""
        state = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return self.check_result("the communicator", state.value)

    def check_result(self, what: str, result: int) -> bool:
        """Whether an `ncclResult_t` is success; raises `TransferFault` for an error."""
        if result not in (SUCCESS, IN_PROGRESS):
            text = self._library.ncclGetErrorString(result).decode()
            last = (self._library.ncclGetLastError(None) or b"").decode().strip()
            raise TransferFault(
                f"NCCL: {what}: {text}" + (f" ({last})" if last else "")
            )
        return result == SUCCESS


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(
            LIBRARY
        )  # this name gives the library that is already loaded
    except OSError:
        spec = importlib.util.find_spec("nvidia.nccl") if _has("nvidia") else None
        for folder in spec.submodule_search_locations or () if spec else ():
            file = Path(folder) / "lib" / LIBRARY
            if file.is_file():
                return ctypes.CDLL(str(file))
    raise EngineFault(f"there is no {LIBRARY} here; inflight_nccl needs torch for CUDA")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
