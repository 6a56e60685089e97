"""What the host keeps of the live weights while their own memory is given back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from vllm.inflight.worker.memory.arena import Arena, extent

CHUNK_BYTES = 1 << 30
"""Page-locked memory comes in powers of two: what is copied at once is one."""

Place = tuple[int, int]
"""(address, bytes) in the live range."""


class HostCopy:
    """Bytes of an arena's live range, and their way back to the same addresses."""

    def __init__(self, arena: Arena, places: Iterable[Place]) -> None:
        self._arena = arena
        self._kept: list[tuple[int, torch.Tensor]] = []
        """What was at an address."""
        for start, num_bytes in places:
            for at in range(start, start + num_bytes, CHUNK_BYTES):
                part = arena.bytes_at(at, min(CHUNK_BYTES, start + num_bytes - at))
                kept = torch.empty(
                    part.shape, dtype=part.dtype, pin_memory=part.is_cuda
                )
                self._kept.append((at, kept.copy_(part)))

    def restore(self) -> None:
        """Put everything back; what was not kept becomes zero."""
        for start, num_bytes in everything(self._arena):
            self._arena.bytes_at(start, num_bytes).zero_()
        for at, kept in self._kept:
            self._arena.bytes_at(at, kept.numel()).copy_(kept)
        if self._arena.device.type == "cuda":
            torch.cuda.synchronize(self._arena.device)  # the arena copies elsewhere


def everything(arena: Arena) -> list[Place]:
    """All of the live range that has memory."""
    base = arena.stats()["base"]
    return [(base + offset, num_bytes) for offset, num_bytes in arena.runs()]


def beside(arena: Arena, tensors: Iterable[torch.Tensor]) -> Iterator[Place]:
    """All of it but what `tensors` are made of: buffers, and what lies between."""
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
