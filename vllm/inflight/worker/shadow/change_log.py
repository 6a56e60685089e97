"""The change log: the elements that an update changes, in place of a second set.

With `--inflight-staging delta` a rank has one set of weights. An update is staged as
places in the live parameters, with the bits that they will have. The commit exchanges
the bits of the log with those of the parameters (swap.py). From then on the log holds
what was served before: it is the way back. The next update is logged from the other end
of the memory, so the way back stays until that update is committed, or until both find
no room.

Every element has a number in the log. At that number, its old and its new bits
contribute to a digest (docs/digest.md). The sum is known when the update is staged, and
the swap computes it once more from the bits that it meets.

What finds no room in the memory beside the weights goes on in host memory, block by
block. A block is allocated when it is first needed, and kept. Blocks of a GPU's log are
page-locked: kernels read and write them by their addresses, as they do memory of the
GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vllm.inflight import ops
from vllm.inflight.errors import ChangeLogFull, OutOfDeviceMemory

Numbers = NDArray[np.int64]

ALIGNMENT = 8
"""Bytes at whose multiples offsets and bits begin."""

SUMS = 3
"""int64 values of the sums on a GPU: both halves of the digest, and the elements."""

GIB = 1 << 30

BLOCK_BYTES = 1 << 28
"""Bytes of a block of host memory. To page-lock much at once would stop decoding."""


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


class Reserved(NamedTuple):
    """Memory for elements of several parameters, to be filled.

    Attributes:
        offsets: addresses of the offsets, int64 [parameters].
        bits: addresses of the bits.
        firsts: number of the first element of each parameter in the log.

    """

    offsets: Numbers
    bits: Numbers
    firsts: Numbers


class Area:
    """Memory of two logs: each takes from an end of its own.

    Args:
        memory: bytes.

    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._used = 0
        """Bytes that are taken, from the top or from the bottom."""
        self._is_from_top = False
        self._num_kept = 0
        """Bytes at the other end, of the log that is kept."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is taken or kept."""
        return not self._used and not self._num_kept

    @property
    def num_left(self) -> int:
        """Bytes that can be taken."""
        return len(self.memory) - self._used - self._num_kept

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """So many bytes; None if there is no room for them."""
        if num_bytes > self.num_left:
            return None
        self._used += num_bytes
        end = len(self.memory) if self._is_from_top else self._used
        start = end - self._used if self._is_from_top else end - num_bytes
        return self.memory[start : start + num_bytes]

    def keep(self) -> None:
        """Keep what is taken; what comes now takes from the other end."""
        self._num_kept, self._used = self._used, 0
        self._is_from_top = not self._is_from_top

    def drop_kept(self) -> None:
        """Keep nothing."""
        self._num_kept = 0

    def empty(self) -> None:
        """Take nothing."""
        self._used = 0


class ChangeLog:
    """The change log of one rank.

    Args:
        device: of the live weights.
        capacity: bytes of its memory, which is allocated here. It is given back for a
            sleep alone.
        host_capacity: most bytes of host memory that it goes on in.

    """

    def __init__(
        self, device: torch.device, capacity: int, host_capacity: int = 0
    ) -> None:
        self.device = device
        self.capacity = capacity
        self.host_capacity = host_capacity
        self._memory: Area | None = None
        self.holds_way_back = False
        """Whether what is logged is the way back: its update is committed."""
        self._is_kept = False
        """Whether the log before this one is still there."""
        self._give_up: Callable[[], None] | None = None
        """What gives the way back up."""
        self._blocks: list[Area] = []
        """In host memory."""
        self._lack = ""
        """Why the host gave no block, for messages."""
        self.has_room = True
        """Whether all elements found room."""
        self.number = 0
        """Changes whenever the log is emptied, and with the live weights."""
        self._pieces: list[_Pieces] = []
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
            self._memory = Area(
                torch.empty(self.capacity, dtype=torch.uint8, device=self.device)
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
        self.drop_kept()
        self._empty()

    def begin(self, give_up: Callable[[], None]) -> None:
        """Begin to log an update, and keep the way back.

        Args:
            give_up: called when that is in the way; it calls `drop_kept`.

        """
        if self.holds_way_back:  # else an update was aborted since
            for area in self._areas:
                area.keep()
            self._is_kept = True
        self._give_up = give_up
        self._empty()

    @property
    def keeps(self) -> bool:
        """Whether the way back is kept beside what is logged."""
        return self._is_kept and not self.holds_way_back

    def drop_kept(self) -> None:
        """Keep the way back no longer, while an update is logged."""
        self._is_kept, self._give_up = False, None
        for area in self._areas:
            area.drop_kept()

    @property
    def _areas(self) -> list[Area]:
        return [*filter(None, [self._memory]), *self._blocks]

    def _empty(self) -> None:
        self.number += 1
        self.holds_way_back = False
        for area in self._areas:
            area.empty()
        self._pieces = []
        self.num_bytes = self.num_elements = self._num_counted = 0
        self.has_room, self._lack = True, ""
        self._terms, self.sums = ops.Digest.ZERO, None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the log has by now."""
        return sum(len(block.memory) for block in self._blocks)

    def require_room(self) -> None:
        """Raise `ChangeLogFull` unless all elements found room."""
        if self.has_room:
            return
        needed = self.num_bytes / GIB
        raise ChangeLogFull(
            f"the update changes {self.num_elements} elements on this rank, and their "
            f"log takes {self.num_bytes} bytes; there is room for {self.capacity}, and "
            f"for {self.host_capacity} in host memory{self._lack}. "
            f"--inflight-delta-gib {_rounded_up(needed)} has room for them",
            missing_bytes=max(
                ALIGNMENT, self.num_bytes - self.capacity - self.host_capacity
            ),
        )

    @property
    def stretches(self) -> list[Logged]:
        """The elements of the log, one entry for each stretch of a parameter."""
        return [logged for pieces in self._pieces for logged in pieces.stretches()]

    @property
    def memory(self) -> list[torch.Tensor]:
        """Where the elements lie; uint8."""
        return [pieces.memory for pieces in self._pieces]

    @property
    def params(self) -> set[str]:
        """The parameters that have elements in the log."""
        return {param for pieces in self._pieces for param in pieces.params}

    def table(self, columns: int) -> tuple[list[str], Numbers]:
        """The stretches as rows of numbers, for kernels.

        Args:
            columns: of the table, at least 5.

        Returns:
            the parameter of each row; and int64 [stretches, columns]: addresses of
            offsets and bits, number of elements, number of the first one in the log,
            bytes of an element, and zeros.

        """
        params = [param for pieces in self._pieces for param in pieces.params]
        rows = np.zeros((len(params), columns), dtype=np.int64)
        if params:
            rows[:, :5] = np.concatenate([pieces.rows for pieces in self._pieces])
        return params, rows

    def reserve(self, param: str, num: int, width: int) -> Logged | None:
        """Memory for elements of a parameter, to be filled; None if there is no room.

        Elements without room are counted, so that the error can say how much is
        missing.
        """
        if self.reserve_all([param], np.array([num]), np.array([width])) is None:
            return None
        (logged,) = self._pieces[-1].stretches()
        return logged

    def reserve_all(
        self, params: Sequence[str], counts: Numbers, widths: Numbers
    ) -> Reserved | None:
        """Memory for elements of several parameters; None if there is no room for all.

        Args:
            params: the parameter of each stretch.
            counts: its elements.
            widths: bytes of one of them.

        """
        if len(params) > 1 and not self._has_room_beside(_sizes(counts, widths)):
            # Host memory is taken stretch by stretch, as blocks have to be filled.
            each = [
                self.reserve_all([param], counts[n : n + 1], widths[n : n + 1])
                for n, param in enumerate(params)
            ]
            found = [one for one in each if one is not None]
            if len(found) < len(each):
                return None
            return Reserved(*map(np.concatenate, zip(*found, strict=True)))
        sizes = _sizes(counts, widths)
        num_bytes, num = int(sizes.sum()), int(counts.sum())
        firsts = self.num_elements + np.cumsum(counts) - counts
        self.num_elements += num
        self.num_bytes += num_bytes
        space = self._take(num_bytes) if self.has_room else None
        if space is None:
            self.has_room = False
            return None
        offsets = space.data_ptr() + np.cumsum(sizes) - sizes
        bits = offsets + _aligned_all(4 * counts)
        rows = np.stack((offsets, bits, counts, firsts, widths), 1)
        self._pieces.append(_Pieces(tuple(params), rows, space))
        return Reserved(offsets, bits, firsts)

    def _has_room_beside(self, sizes: Numbers) -> bool:
        """Whether the memory beside the weights has room for all of these bytes."""
        assert self._memory is not None
        return self.has_room and int(sizes.sum()) <= self._memory.num_left

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
        # Converted first: a copy to the host would convert there.
        logged.offsets.copy_(offsets.to(torch.int32), non_blocking=True)
        logged.bits.copy_(new, non_blocking=True)
        first = logged.first
        numbers = torch.arange(first, first + num, device=self.device)
        self._num_counted += num
        if self.device.type == "cpu":
            self._terms += ops.digest_of_changes(numbers, old, new, width)
            return
        from vllm.inflight.ops.triton_kernels import add_changes

        add_changes(numbers, old.contiguous(), new.contiguous(), self.sums_on_device())

    def _take(self, num_bytes: int) -> torch.Tensor | None:
        """Memory beside the weights, or else host memory; None if there is none.

        Where there is none for two logs, the way back is given up.
        """
        assert self._memory is not None
        if (space := self._memory.take(num_bytes)) is not None:
            return space
        for block in self._blocks:
            if (space := block.take(num_bytes)) is not None:
                return space
        if (fresh := self._new_block(num_bytes)) is not None:
            self._blocks.append(fresh)
            return fresh.take(num_bytes)
        if not self.keeps:
            return None
        assert self._give_up is not None
        self._give_up()
        return self._take(num_bytes)

    def _new_block(self, num_bytes: int) -> Area | None:
        """A block with room for so many bytes; None if there is no memory for it."""
        if self.host_capacity - self.host_bytes < num_bytes:
            # Blocks that nothing refers to are too short.
            self._blocks = [block for block in self._blocks if not block.is_empty]
        left = self.host_capacity - self.host_bytes
        if left < num_bytes:
            return None
        size = min(left, max(num_bytes, BLOCK_BYTES))
        try:
            is_pinned = self.device.type == "cuda"
            memory = torch.empty(
                size, dtype=torch.uint8, device="cpu", pin_memory=is_pinned
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self._lack = f", which the host does not have ({error})"
            return None
        return Area(memory)

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


class _Pieces(NamedTuple):
    """Stretches whose memory was taken at once.

    Attributes:
        params: the parameter of each.
        rows: int64 [stretches, 5], as in `ChangeLog.table`.
        memory: uint8, in which their addresses lie.

    """

    params: tuple[str, ...]
    rows: Numbers
    memory: torch.Tensor

    def stretches(self) -> Iterator[Logged]:
        """Each of them, as tensors in that memory."""
        base = self.memory.data_ptr()
        for param, row in zip(self.params, self.rows.tolist(), strict=True):
            offsets_at, bits_at, num, first, width = row
            offsets = self.memory[offsets_at - base :][: 4 * num].view(torch.int32)
            bits = self.memory[bits_at - base :][: width * num]
            yield Logged(param, width, offsets, bits.view(ops.INTEGERS[width]), first)


def capacity_of(gib: float, num_bytes: int) -> int:
    """Bytes of the log of a rank.

    Args:
        gib: `--inflight-delta-gib`; 0 means a twentieth of the weights.
        num_bytes: of the weights of this rank.

    """
    wanted = int(gib * GIB) if gib else max(num_bytes // 20, 1 << 16)
    return _aligned(wanted)


def host_capacity_of(gib: float, num_bytes: int) -> int:
    """Most bytes of host memory that the log of a rank goes on in.

    Args:
        gib: `--inflight-delta-host-gib`; -1 means a quarter of the weights.
        num_bytes: of the weights of this rank.

    """
    return _aligned(num_bytes // 4 if gib < 0 else int(gib * GIB))


def _sizes(counts: Numbers, widths: Numbers) -> Numbers:
    """Bytes that the elements of each stretch take."""
    return _aligned_all(4 * counts) + _aligned_all(widths * counts)


def _aligned_all(num_bytes: Numbers) -> Numbers:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _rounded_up(gib: float) -> str:
    """A number of GiB that is no less, with three decimals."""
    return f"{math.ceil(gib * 1000) / 1000:g}"
