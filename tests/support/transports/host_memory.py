"""Host memory in place of a GPU's: what is exported is mapped at its own address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from vllm.inflight.errors import TransferFault
from vllm.inflight.transport.cuda_ipc.driver import HANDLE_BYTES, Extent


class HostMemory:
    """Implements `Memory`; every storage it was shown is an allocation."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.settled: list[set[torch.device]] = []
        self.at_hand: torch.device | None = None
        self._extents: dict[int, int] = {}
        self._shown: list[torch.Tensor] = []  # nothing else gets their addresses
        self._freed: set[int] = set()
        self.exported: dict[bytes, int] = {}
        self.num_maps = 0
        self.mapped: set[int] = set()
        self.copied: list[int] = []
        self.events: dict[bytes, Callable[[], bool]] = {}

    def show(self, tensors: dict[str, torch.Tensor]) -> None:
        """Let the storages of tensors be known."""
        self._shown += tensors.values()
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            self._extents[storage.data_ptr()] = storage.nbytes()

    def free(self, tensor: torch.Tensor) -> None:
        """Give the storage of a tensor back: it can no more be exported.

        Whoever has mapped it may still read it.
        """
        self._freed.add(tensor.untyped_storage().data_ptr())

    def gpu(self, device: torch.device) -> str:
        return str(device)

    def settle(self, devices: Iterable[torch.device]) -> None:
        self.settled.append(set(devices))

    @contextmanager
    def at(self, device: torch.device) -> Iterator[None]:
        self.at_hand = device
        yield
        self.at_hand = None

    def extent(self, address: int) -> Extent:
        for base, size in self._extents.items():
            if base <= address < base + size:
                return Extent(base, size)
        raise TransferFault(f"no allocation at {address}")

    def export(self, address: int) -> bytes:
        assert self.at_hand is not None, "of whichever device is the current one"
        if address in self._freed:
            raise TransferFault("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE (1)")
        handle = address.to_bytes(HANDLE_BYTES, "big")
        self.exported[handle] = address
        return handle

    def map(self, handle: bytes) -> Extent:
        if handle not in self.exported:
            raise TransferFault("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        self.num_maps += 1
        self.mapped.add(self.exported[handle])
        return self.extent(self.exported[handle])

    def unmap(self, address: int) -> None:
        self.mapped.remove(address)

    @contextmanager
    def event(self, handle: bytes) -> Iterator[Callable[[], bool]]:
        if handle not in self.events:
            raise TransferFault("cuIpcOpenEventHandle: CUDA_ERROR_INVALID_VALUE (1)")
        yield self.events[handle]

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        assert stream == 0
        self.copied.append(num_bytes)
        ctypes.memmove(target, source, num_bytes)
