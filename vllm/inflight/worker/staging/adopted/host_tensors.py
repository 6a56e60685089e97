"""Tensors in host memory that a worker extension loads into an engine on a GPU.

This is for engines with two sets of weights there. prime-rl's extension reads files,
and loads what is in the page cache. A copy from memory that is not page-locked holds
the driver until it ends: the thread that decodes could launch nothing meanwhile, for a
fifth of a second at 1.2 GB. So the bytes go through page-locked memory, and are checked
on the GPU. Several threads fill that memory: one alone reads about 4 GB/s of a file
that is mapped.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

PIECE_BYTES = 32 << 20
"""Bytes that are copied at once."""
NUM_PIECES = 2
"""One is filled while the GPU reads the other."""
NUM_THREADS = 4
"""That fill a piece."""
LEAST_BYTES = 1 << 20
"""A thread fills at least as much of a piece, if there is as much."""


class PageLocked(NamedTuple):
    """Page-locked memory, and when the GPU has read it."""

    memory: torch.Tensor
    is_read: torch.cuda.Event | None


class HostTensors:
    """Copies tensors of the host to a device, on its current stream.

    Args:
        device: of the engine.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[PageLocked] = []

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device; all others as they are.

        Where the device has no memory for it, the tensor stays in host memory.
        """
        if tensor.device.type != "cpu" or self._device.type == "cpu":
            return tensor
        try:
            return self.copied(tensor)
        except torch.OutOfMemoryError:
            return tensor

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device. The host tensor may change afterwards."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        target = made.view(-1).view(torch.uint8)
        for number, start in enumerate(range(0, len(source), PIECE_BYTES)):
            part = source[start : start + PIECE_BYTES]
            piece = self._piece(number % NUM_PIECES)
            if piece.is_read is not None:
                piece.is_read.synchronize()
            _fill(piece.memory[: len(part)].numpy(), part.numpy())
            to = target[start : start + len(part)]
            to.copy_(piece.memory[: len(part)], non_blocking=True)
            if piece.is_read is not None:
                piece.is_read.record(torch.cuda.current_stream(self._device))
        return made

    def _piece(self, number: int) -> PageLocked:
        while number >= len(self._pieces):
            on_gpu = self._device.type == "cuda"
            memory = torch.empty(
                PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=on_gpu
            )
            # To wait for a blocking event takes no core.
            is_read = torch.cuda.Event(blocking=True) if on_gpu else None
            self._pieces.append(PageLocked(memory, is_read))
        return self._pieces[number]


def _fill(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """Copy bytes, the parts of many by several threads."""
    per_thread = max(-(-len(source) // NUM_THREADS), LEAST_BYTES)
    parts = [slice(at, at + per_thread) for at in range(0, len(source), per_thread)]

    def fill(part: slice) -> None:
        # A torch copy would begin threads of its own in each of these.
        np.copyto(target[part], source[part])

    if len(parts) == 1:
        fill(parts[0])
        return
    for _ in _threads().map(fill, parts):
        pass  # raises what a thread has raised


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, "inflight-copy")
