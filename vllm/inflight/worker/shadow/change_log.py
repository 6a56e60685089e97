"""The change log: the elements that an update changes, in place of a second set.

With `--inflight-staging delta` a rank has one set of weights. An update is staged as
places in the live parameters, with the bits that they will have. The commit exchanges
the bits of the log with those of the parameters (swap.py). From then on the log holds
what was served before: it is the way back, until the next update begins to write.

Every element has a number in the log. At that number, its old and its new bits
contribute to a digest (docs/digest.md). The sum is known when the update is staged, and
the swap computes it once more from the bits that it meets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from vllm.inflight import ops
from vllm.inflight.errors import ChangeLogFull, OutOfDeviceMemory

ALIGNMENT = 8
"""Bytes at whose multiples offsets and bits begin."""

SUMS = 3
"""int64 values of the sums on a GPU: both halves of the digest, and the elements."""

GIB = 1 << 30


class Logged(NamedTuple):
    """Elements of one parameter in the log.

    Attributes:
        param: name of the parameter.
        width: bytes of an element.
        offsets: places in the memory of the parameter, int32; -1 for an element that is
            served on another rank.
        bits: what the places get, or had before; integers of that width.
        first: number of the first of these elements in the log.

    """

    param: str
    width: int
    offsets: torch.Tensor
    bits: torch.Tensor
    first: int


class ChangeLog:
    """The change log of one rank.

    Args:
        device: of the live weights.
        capacity: bytes of its memory, which is allocated here. It is given back for a
            sleep alone.

    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.device = device
        self.capacity = capacity
        self._memory: torch.Tensor | None = None
        self.number = 0
        """Changes whenever the log is emptied."""
        self.stretches: list[Logged] = []
        self.num_bytes = 0
        """Bytes of the elements, whether the log has room for them or not."""
        self.num_elements = 0
        self._terms = ops.Digest.ZERO
        self._num_counted = 0
        self.sums: torch.Tensor | None = None
        """On a GPU: the sums over elements whose bits the host has not seen."""
        self.allocate()

    def allocate(self) -> None:
        """Get memory, unless there is some; raises `OutOfDeviceMemory`."""
        if self._memory is not None:
            return
        try:
            self._memory = torch.empty(
                self.capacity, dtype=torch.uint8, device=self.device
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise OutOfDeviceMemory(
                f"there is no memory for a log of {self.capacity} bytes: {error}",
                missing_bytes=self.capacity,
            ) from error

    def free(self) -> None:
        """Give the memory back; `allocate` gets it again."""
        self.clear()
        self._memory = None

    def clear(self) -> None:
        """Empty the log: there is no way back any more."""
        self.number += 1
        self.stretches = []
        self.num_bytes = self.num_elements = self._num_counted = 0
        self._terms, self.sums = ops.Digest.ZERO, None

    @property
    def has_room(self) -> bool:
        """Whether all elements found room."""
        return self.num_bytes <= self.capacity

    def require_room(self) -> None:
        """Raise `ChangeLogFull` unless all elements found room."""
        if self.has_room:
            return
        needed = self.num_bytes / GIB
        raise ChangeLogFull(
            f"the update changes {self.num_elements} elements on this rank, and their "
            f"log takes {self.num_bytes} bytes; there is room for {self.capacity}. "
            f"--inflight-delta-gib {_rounded_up(needed)} has room for them",
            missing_bytes=self.num_bytes - self.capacity,
        )

    def reserve(self, param: str, num: int, width: int) -> Logged | None:
        """Memory for elements of a parameter, to be filled; None if there is no room.

        Elements without room are counted, so that the error can say how much is
        missing.
        """
        first, at = self.num_elements, self.num_bytes
        bits_at = at + _aligned(4 * num)
        self.num_elements += num
        self.num_bytes = bits_at + _aligned(width * num)
        if not self.has_room:
            return None
        assert self._memory is not None
        offsets = self._memory[at : at + 4 * num].view(torch.int32)
        bits = self._memory[bits_at : bits_at + width * num].view(ops.INTEGERS[width])
        logged = Logged(param, width, offsets, bits, first)
        self.stretches.append(logged)
        return logged

    def add(
        self, param: str, offsets: torch.Tensor, old: torch.Tensor, new: torch.Tensor
    ) -> None:
        """Log elements of a parameter.

        Args:
            param: its name.
            offsets: places in its memory; each only once per update.
            old: the bits that are served there, as integers.
            new: the bits that the update brings.

        """
        num, width = len(offsets), new.element_size()
        if not num or (logged := self.reserve(param, num, width)) is None:
            return
        logged.offsets.copy_(offsets)
        logged.bits.copy_(new)
        first = logged.first
        numbers = torch.arange(first, first + num, device=self.device)
        self._num_counted += num
        if self.device.type == "cpu":
            self._terms += ops.digest_of_changes(numbers, old, new, width)
            return
        from vllm.inflight.ops.triton_kernels import add_changes

        add_changes(numbers, old.contiguous(), new.contiguous(), self.sums_on_device())

    def sums_on_device(self) -> torch.Tensor:
        """The sums on the GPU: int64 [SUMS]; whoever fills `reserve` adds to them."""
        if self.sums is None:
            self.sums = torch.zeros(SUMS, dtype=torch.int64, device=self.device)
        return self.sums

    def expected(self) -> tuple[ops.Digest, int]:
        """What a swap has to find: the sum over all elements, and their number."""
        terms, num = self._terms, self._num_counted
        if self.sums is not None:
            a, b, others = self.sums.tolist()
            terms, num = terms + ops.Digest(a % 2**64, b % 2**64), num + others
        return terms, num


def capacity_of(gib: float, num_bytes: int) -> int:
    """Bytes of the log of a rank.

    Args:
        gib: `--inflight-delta-gib`; 0 means a twentieth of the weights.
        num_bytes: of the weights of this rank.

    """
    wanted = int(gib * GIB) if gib else max(num_bytes // 20, 1 << 16)
    return _aligned(wanted)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _rounded_up(gib: float) -> str:
    """A number of GiB that is no less, with three decimals."""
    return f"{math.ceil(gib * 1000) / 1000:g}"
