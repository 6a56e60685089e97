"""A copy of the live weights on the host, kept while their GPU memory is given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from vllm.inflight.worker.memory.arena import Arena, extent

CHUNK_BYTES = 1 << 30
"""Bytes that are copied at once. Page-locked memory comes in powers of two."""

Place = tuple[int, int]
"""(address, bytes) in the live range."""


class HostCopy:
    """A copy of parts of an arena's live range, which can be written back.

    Args:
        arena: where the live weights lie.
        places: the parts that are copied.

    """

    def __init__(self, arena: Arena, places: Iterable[Place]) -> None:
        self._arena = arena
        self._kept: list[tuple[int, torch.Tensor]] = []
        """(address, its bytes)."""
        for start, num_bytes in places:
            for at in range(start, start + num_bytes, CHUNK_BYTES):
                part = arena.bytes_at(at, min(CHUNK_BYTES, start + num_bytes - at))
                kept = torch.empty(
                    part.shape, dtype=part.dtype, pin_memory=part.is_cuda
                )
                self._kept.append((at, kept.copy_(part)))

    def restore(self) -> None:
        """Write all copied bytes back; bytes that were not copied become zero."""
        for start, num_bytes in everything(self._arena):
            self._arena.bytes_at(start, num_bytes).zero_()
        for at, kept in self._kept:
            self._arena.bytes_at(at, kept.numel()).copy_(kept)
        if self._arena.device.type == "cuda":
            torch.cuda.synchronize(self._arena.device)  # the arena copies elsewhere


def everything(arena: Arena) -> list[Place]:
    """All parts of the live range that have memory."""
    base = arena.stats()["base"]
    return [(base + offset, num_bytes) for offset, num_bytes in arena.runs()]


def beside(arena: Arena, tensors: Iterable[torch.Tensor]) -> Iterator[Place]:
    """The parts of the live range that are not in `tensors`: buffers, and gaps."""
    taken = sorted((t.data_ptr(), extent(t)) for t in tensors if arena.contains(t))
    for start, num_bytes in everything(arena):
        end = start + num_bytes
        for address, size in taken:
            if not start <= address < end:
                continue
            if address > start:
                yield start, address - start
            start = address + size
        if start < end:
            yield start, end - start
