"""Encoding on a GPU: a kernel finds what changed, and torch encodes it there."""

from __future__ import annotations

from collections import deque

import torch

from vllm.inflight.delta import reference
from vllm.inflight.delta.part import HEADER, Part, block_elements


class DeviceCoder:
    """Encodes tensors of one GPU into parts on that GPU."""

    def __init__(self, limit: int, values: int) -> None:
        self._limit, self._values = limit, values
        self._waiting: deque[reference.EncodedBlock] = deque()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a part of all blocks that wait; 0 without any."""
        return HEADER.size + self._num_bytes if self._waiting else 0

    def add(
        self, number: int, start: int, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode the changes between two flat tensors of integers from `start` on."""
        from vllm.inflight.delta.triton_kernels import find

        self._encode(number, *find(old, new, start))

    def add_places(
        self, number: int, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Encode changes with known places."""
        if int(places[0]) < 0:
            raise ValueError("a position is negative")
        if not bool((places[1:] > places[:-1]).all()):
            raise ValueError("positions must strictly increase")
        self._encode(number, places, old, new)

    def _encode(
        self, number: int, places: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        if not len(places):
            return
        size = block_elements(self._limit, new.element_size())
        owners = places // size
        _, counts = owners.unique_consecutive(return_counts=True)
        first = 0
        for count in counts.tolist():
            own = slice(first, first + count)
            block = reference.encode_block(
                number, places[own], old[own], new[own], self._values
            )
            self._waiting.append(block)
            self._num_bytes += block.num_bytes
            first += count

    def take(self, limit: int) -> Part:
        """The first blocks that wait and fit into `limit` bytes, as a part."""
        taken = [self._waiting.popleft()]
        size = HEADER.size + taken[0].num_bytes
        while self._waiting and size + self._waiting[0].num_bytes <= limit:
            taken.append(self._waiting.popleft())
            size += taken[-1].num_bytes
        self._num_bytes -= size - HEADER.size
        return reference.assemble(taken, taken[0].sections[0].device)
